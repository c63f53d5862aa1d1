"""Objects that CuTeDSL may meet inside dynamic control flow although they hold nothing that changes there."""

from __future__ import annotations

from typing import Any


class Fixed:
    """A base for immutable parts of a kernel: its fields are traced values and constants, set once.

    CuTeDSL carries every object used in a dynamic ``if`` or loop through that region and asks it for its values. These
    parts have none to carry: what they hold was made before the region and dominates it.
    """

    def __extract_mlir_values__(self) -> list[Any]:
        return []

    def __new_from_mlir_values__(self, values: list[Any]) -> Any:
        return self
