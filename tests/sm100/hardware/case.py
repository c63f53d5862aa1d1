"""A case: a CuTeDSL function, its inputs, and the outputs by which two machines are compared."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

PATTERN = 0xA5
"""Outputs are filled with this byte: what a kernel must leave alone is compared, too."""


def untouched(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """An output as it is before the kernel runs."""
    tensor = torch.empty(tuple(shape), dtype=dtype)
    tensor.view(torch.uint8).fill_(PATTERN)
    return tensor


def from_bits(bits: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    """A tensor of ``dtype`` with the bits of an integer array of that width."""
    signed = np.ascontiguousarray(bits).view(f"i{bits.itemsize}")
    return torch.from_numpy(signed.copy()).view(dtype)


@dataclass(frozen=True)
class Case:
    """What both machines run.

    Attributes:
        name: of the case.
        function: a callable with ``@cute.jit``, taking the inputs and then the outputs.
        inputs: tensors in host memory.
        outputs: the same, with their contents before the run.
        rows: names for the rows of an output, by output: each is compared under its own name. An output with no
            names is not compared.
        ulp: by result's name, by how many units in the last place f32 values may differ. Others must be equal.
        timed: whether engines' timing could matter, so that the emulator should run it in all its modes.
    """

    name: str
    function: Callable[..., Any]
    inputs: Mapping[str, torch.Tensor]
    outputs: Mapping[str, torch.Tensor]
    rows: Mapping[str, Sequence[str]] = field(default_factory=dict)
    ulp: Mapping[str, int] = field(default_factory=dict)
    timed: bool = False

    def results(self, outputs: Mapping[str, torch.Tensor]) -> dict[str, bytes]:
        """The bytes of each result, named ``case/output`` or ``case/row``."""
        found = {}
        for name, tensor in outputs.items():
            parts = self.rows.get(name)
            pieces = {name: tensor} if parts is None else dict(zip(parts, tensor, strict=bool(parts)))
            for piece, values in pieces.items():
                found[f"{self.name}/{piece}"] = values.contiguous().view(torch.uint8).numpy().tobytes()
        return found
