"""Checks of values that are copied to a device: each leaves a flag there, and all flags are read together.

Looking at one waits for the device, which then has nothing to do while the host reads on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

LOOK_AFTER = 4096
"""Flags; one or two layers of Flash have as many. A damaged file ends a load after a few layers."""


class Checked(NamedTuple):
    """A tensor that was read, or the part of it."""

    name: str
    rows: slice | None
    cols: slice | None


class LateChecks:
    """Collects the flags of checks on a device.

    Args:
        explain: raises, for a part whose flag is set.
    """

    def __init__(self, explain: Callable[[Checked], None]):
        self._explain = explain
        self._pending: list[tuple[Checked, Tensor]] = []

    def add(self, checked: Checked, is_wrong: Tensor) -> None:
        """``is_wrong``: bool, 0-d, true if the part holds what it must not. Raises as :meth:`look`, now and then."""
        self._pending.append((checked, is_wrong))
        if len(self._pending) >= LOOK_AFTER:
            self.look()

    def look(self) -> None:
        """Wait for the device, and raise the error of the first wrong part."""
        pending, self._pending = self._pending, []
        if pending:
            found = torch.stack([is_wrong for _, is_wrong in pending]).tolist()
            for (checked, _), is_wrong in zip(pending, found, strict=True):
                if is_wrong:
                    self._explain(checked)
