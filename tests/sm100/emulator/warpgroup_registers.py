"""The order of accesses to the registers that wgmma uses asynchronously.

Source: PTX ISA, ``wgmma.fence`` and ``wgmma.wait_group``. Of a multiplication in flight, that is until a wait_group
covers it, accumulators must be neither read nor written, and registers that hold A must not be written. Registers that
the warp itself has accessed (of A: written) take a ``wgmma.fence`` before a multiplication uses them, and so do
accumulators that one of another shape has used. Whether it breaks these rules does not depend on when engines act.

Registers are PTX's: a copy of an accumulator in flight counts as a read though ptxas might do without it. A move to a
register does not by itself ask for a fence, but only if what it moves was written since the last one
(``Options.strict_moves``).
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from tests.sm100.emulator.errors import HazardError


class WarpgroupRegisters:
    """What multiplications do with the 32-bit registers of one warp."""

    def __init__(self, registers: Counter[str]) -> None:
        count = registers["32"]
        self._accumulating = np.zeros(count, np.int64)
        self._holding = np.zeros(count, np.int64)
        """By register: multiplications in flight of which it is an accumulator, or holds A."""
        self._accessed = np.ones(count, bool)
        self._written = np.ones(count, bool)
        """By register: whether the warp has accessed, or written, it since its last fence."""
        self._fenced = False
        self._shapes = np.zeros(count, np.int64)
        """By register: N of what used it as an accumulator since the last fence, 0 for nothing."""

    def fence(self) -> None:
        """wgmma.fence"""
        self._fenced = True
        self._accessed[:] = False
        self._written[:] = False
        self._shapes[:] = 0

    def move(self, touched: np.ndarray, target: int, source: int | None) -> None:
        """The warp moves ``source``, None for a constant, to ``target``.

        Raises:
            HazardError: a multiplication in flight uses them.
        """
        self._check(touched, np.array([target]))
        if source is not None and self._written[source]:
            self._accessed[target] = self._written[target] = True

    def access(self, touched: np.ndarray, written: np.ndarray) -> None:
        """The warp reads or writes ``touched``, of which it writes ``written``.

        Raises:
            HazardError: a multiplication in flight uses them.
        """
        self._check(touched, written)
        self._accessed[touched] = True
        self._written[written] = True

    def _check(self, touched: np.ndarray, written: np.ndarray) -> None:
        for which, counts, use in ((touched, self._accumulating, "accumulates"), (written, self._holding, "reads")):
            busy = counts[which] > 0
            if busy.any():
                raise HazardError(
                    f"access to 32-bit register {which[busy][0]}, which a wgmma in flight {use}: "
                    "wgmma.wait_group is missing"
                )

    def issue(self, accumulators: np.ndarray, operands: np.ndarray, shape: int) -> None:
        """A multiplication takes these accumulators and, if A comes from registers, these operands.

        Raises:
            HazardError: a wgmma.fence is missing, or another one in flight uses them in another way.
        """
        if not self._fenced or self._accessed[accumulators].any() or self._written[operands].any():
            raise HazardError("wgmma of registers that were accessed without wgmma.fence since")
        shapes = self._shapes[accumulators]
        if (shapes[shapes > 0] != shape).any():
            raise HazardError("wgmma of accumulators of one of another shape without wgmma.fence since")
        if self._accumulating[operands].any() or self._holding[accumulators].any():
            raise HazardError("wgmma of registers that are A's here and accumulators of one in flight, or vice versa")
        self._shapes[accumulators] = shape
        self._accumulating[accumulators] += 1
        self._holding[operands] += 1

    def retire(self, accumulators: np.ndarray, operands: np.ndarray) -> None:
        """A multiplication has been waited for."""
        self._accumulating[accumulators] -= 1
        self._holding[operands] -= 1
