"""Attempts at peers of the GEMMs: those that are missing, fail or compute something else are left out."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch import Tensor

from benchmarks.families import relative_error

Result = TypeVar("Result")


class Attempts:
    """Whether a peer can be asked; what it fails at is printed once and leaves its column empty."""

    def __init__(self, name: str, wanted: bool) -> None:
        self.usable = wanted
        self._name = name
        self._said: set[str] = set()

    def attempt(self, work: Callable[[], Result]) -> Result | None:
        """The result of ``work``; None, and the reason in print, if it fails."""
        if not self.usable:
            return None
        try:
            return work()
        except Exception as error:
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            self.leave_out(f"{type(error).__name__}: {' / '.join([*lines[:1], *lines[1:][-3:]])[:800]}")
            return None

    def leave_out(self, problem: str) -> None:
        """Print why something is left out, once."""
        if problem not in self._said:
            self._said.add(problem)
            print(f"{self._name}, left out: {problem}", flush=True)


def require_near(found: Tensor, expected: Tensor, limit: float) -> None:
    """Raise ValueError if a peer's result is not what is expected."""
    error = relative_error(found, expected)
    if not error < limit:
        raise ValueError(f"its result: expected an error below {limit}, found {error:.3g}")
