"""Launches that are noted instead of made: what a kernel is given, on any machine."""

from __future__ import annotations

from typing import Any


class Launches:
    """Stands for a kernel of ``triton.jit``, and notes the arguments of its launches by its parameters' names."""

    def __init__(self, kernel: Any) -> None:
        self.given: list[dict[str, Any]] = []
        self._names = kernel.arg_names

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *arguments, **options: self.given.append(
            {**dict(zip(self._names, arguments, strict=False)), **options}
        )
