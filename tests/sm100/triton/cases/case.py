"""A case: an op on small random inputs, which the emulator and the interpreter both run, and how near they must be."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

Outputs = dict[str, Tensor]
Bound = Callable[[Tensor, Tensor], Tensor]
"""From what was found and what is expected to where they are too far apart."""


@dataclass(frozen=True)
class Case:
    """An op with its inputs.

    Attributes:
        compute: runs it once on the CPU, on equal inputs each time; outputs begin poisoned.
        kernels: what it launches, each once at least.
        bounds: of outputs that need not be equal, by name.
        full: whether it is left out unless asked for.
    """

    compute: Callable[[], Outputs]
    kernels: frozenset[str]
    bounds: Mapping[str, Bound]
    full: bool = False

    def differences(self, found: Outputs, expected: Outputs) -> str:
        """Empty where the outputs are as near as they must be, else what is not."""
        if found.keys() != expected.keys():
            return f"outputs {sorted(found)} and {sorted(expected)}"
        wrong = []
        for name, wanted in expected.items():
            far = self.bounds.get(name, different)(found[name], wanted)
            if bool(far.any()):
                at = tuple(int(index) for index in far.nonzero()[0])
                wrong.append(
                    f"{name}: {int(far.sum())} of {far.numel()}, the first at {at}: "
                    f"{found[name][at]} where {wanted[at]} is expected"
                )
        return "; ".join(wrong)


CASES: dict[str, Case] = {}


def case(
    *kernels: str, bounds: Mapping[str, Bound] | None = None, full: bool = False
) -> Callable[[Callable[[], Outputs]], Callable[[], Outputs]]:
    """Register a function under its name; arguments as the attributes of ``Case``."""

    def register(compute: Callable[[], Outputs]) -> Callable[[], Outputs]:
        name = compute.__name__
        assert name not in CASES
        CASES[name] = Case(compute, frozenset(kernels), bounds or {}, full)
        return compute

    return register


def different(found: Tensor, expected: Tensor) -> Tensor:
    """Equal bits, any NaN for a NaN."""
    assert found.shape == expected.shape and found.dtype == expected.dtype
    if not found.is_floating_point():
        return found != expected
    # Signs of zeros count.
    return ((found != expected) | (found.signbit() != expected.signbit())) & ~(found.isnan() & expected.isnan())


def close(rtol: float, atol: float = 0.0) -> Bound:
    """Within a relative and an absolute distance."""

    def too_far(found: Tensor, expected: Tensor) -> Tensor:
        wanted = expected.double()
        near = (found.double() - wanted).abs() <= wanted.abs() * rtol + atol
        return different(found, expected) & ~near

    return too_far


def seldom(share: float, rtol: float, of_largest: float = 0.0) -> Bound:
    """Few differ, and those within a relative distance: where a last bit decides how a result is rounded.

    of_largest: what they may differ by in any case, of the largest value: sums that nearly cancel have few exact bits.
    """

    def too_far(found: Tensor, expected: Tensor) -> Tensor:
        unequal = different(found, expected)
        if int(unequal.sum()) > 1 + share * unequal.numel():
            return unequal
        largest = float(expected.double().nan_to_num().abs().max())
        return close(rtol, of_largest * largest)(found, expected)

    return too_far


def next_codes(share: float) -> Bound:
    """Bytes of which few differ, as codes next to one another do: a sum's last bit decides a tie."""

    def too_far(found: Tensor, expected: Tensor) -> Tensor:
        unequal = found != expected
        return unequal if int(unequal.sum()) > 1 + share * unequal.numel() else torch.zeros_like(unequal)

    return too_far
