"""What departs from a reference, in words that a report can repeat: which tensor, what was expected, what was found."""

from __future__ import annotations

from typing import Any


class Departure(AssertionError):
    """A result is not what the reference gives.

    Attributes:
        tensor: which one, and where in it.
        expected, found: values there, or an error and its bound.
        detail: how much else departs, and what that may mean.
    """

    def __init__(self, tensor: str, expected: Any, found: Any, detail: str = ""):
        self.tensor, self.expected, self.found, self.detail = tensor, str(expected), str(found), detail
        super().__init__(f"{tensor}: expected {expected}, found {found}" + (f" ({detail})" if detail else ""))
