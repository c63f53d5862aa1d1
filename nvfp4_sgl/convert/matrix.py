"""Converts one matrix to NVFP4, in pieces of its rows, on any device.

The same bytes come out on every device and for every size of piece: each block depends on its 16 values and on the
matrix's global scale alone, and every step is rounded as IEEE 754 says.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce

import torch
from torch import Tensor

from nvfp4_sgl.checkpoint.decoders import MxFp4AsNvFp4
from nvfp4_sgl.checkpoint.reader import CheckpointReader
from nvfp4_sgl.checkpoint.storage import Storage
from nvfp4_sgl.convert.options import Options, Scales
from nvfp4_sgl.convert.plan import Quantise
from nvfp4_sgl.convert.tally import ClassTally
from nvfp4_sgl.formats import mxfp4, nvfp4, ue8m0
from nvfp4_sgl.formats.least_error import quantize_weight_least_error
from nvfp4_sgl.formats.mxfp4 import MxFp4Tensor
from nvfp4_sgl.formats.nvfp4 import NvFp4Tensor
from nvfp4_sgl.formats.values import divide

PIECE = {"cpu": 1 << 20, "cuda": 1 << 25}
"""Elements that are quantised at once. On a CPU they stay in its caches; on a GPU a piece takes about 1 GB."""

ALL_ZERO = -ue8m0.BIAS
"""Largest exponent of a matrix of zeros (:func:`.mxfp4.exponents`)."""


class MatrixConverter:
    """Makes NVFP4 of a checkpoint's matrices.

    Args:
        reader: of the source.
        device: where the arithmetic is done; casts, which are none, are done on the CPU.
    """

    def __init__(self, reader: CheckpointReader, device: torch.device, options: Options):
        self._reader, self._device, self._options = reader, device, options

    def convert(self, step: Quantise) -> tuple[NvFp4Tensor, ClassTally]:
        """Convert: the matrix on the CPU, and its errors.

        Raises:
            CheckpointError: a value is damaged, or too large for NVFP4.
        """
        tally = ClassTally()
        if step.storage is Storage.MXFP4:
            low, high = self._exponents(step)
            reason = mxfp4.why_not_exact(low, high)
            if reason is None:
                tally.exact = 1
                return mxfp4.to_nvfp4(self._packed(step.stem), torch.tensor(high, dtype=torch.int32)), tally
            tally.inexact[step.stem] = reason
        tally.quantised = 1
        return self._quantise(step, tally), tally

    # --- MXFP4 ----------------------------------------------------------------------------------------------------

    def _packed(self, stem: str) -> MxFp4Tensor:
        pieces = _Pieces(self._reader, stem, Storage.MXFP4, slice(None), torch.device("cpu"))
        return MxFp4Tensor(pieces.piece("weight").view(torch.uint8), ue8m0.as_bytes(pieces.piece("scale")))

    def _exponents(self, step: Quantise) -> tuple[int, int]:
        """Smallest and largest block exponent of a matrix, or of the two that are tied."""
        stems = [step.stem, *([step.tied] if step.tied else [])]
        whole = [_Pieces(self._reader, s, Storage.MXFP4, slice(None), torch.device("cpu")) for s in stems]
        found = [tuple(map(int, MxFp4AsNvFp4.exponents(pieces))) for pieces in whole]
        low, high = min(low for low, _ in found), max(high for _, high in found)
        if len(stems) == 1 or mxfp4.why_not_exact(low, high) is None:
            return low, high
        # Blocks of zeros may have any exponent, which matters only where others do not fit.
        found = [tuple(map(int, mxfp4.exponents(self._packed(stem)))) for stem in stems]
        found = [(low, high) for low, high in found if high != ALL_ZERO] or found
        return min(low for low, _ in found), max(high for _, high in found)

    # --- quantising -----------------------------------------------------------------------------------------------

    def _quantise(self, step: Quantise, tally: ClassTally) -> NvFp4Tensor:
        (n, k), scale = step.shape, self._global_scale(step)
        packed = torch.empty(n, k // 2, dtype=torch.uint8)
        block_scale = torch.empty(n, k // nvfp4.BLOCK, dtype=torch.float8_e4m3fn)
        error, square = (torch.zeros((), dtype=torch.float64, device=self._device) for _ in range(2))
        quantise = {Scales.MAX: nvfp4.quantize_weight, Scales.MSE: quantize_weight_least_error}[self._options.scales]
        for rows, values in self._values(step.stem, step):
            quantised = quantise(values, scale)
            packed[rows] = quantised.packed.cpu()
            block_scale[rows] = quantised.block_scale.cpu()
            error += _sum_of_squares(values.float() - quantised.dequantize())
            square += _sum_of_squares(values.float())
        tally.error, tally.square = error.item(), square.item()
        return NvFp4Tensor(packed, block_scale, scale.cpu())

    def _global_scale(self, step: Quantise) -> Tensor:
        """fp32 scalar on the device: ModelOpt's amax / 2688, of the two matrices that are tied if there are two."""
        stems = [step.stem, *([step.tied] if step.tied else [])]
        largest = [values.abs().amax().float() for stem in stems for _, values in self._values(stem, step)]
        amax = reduce(torch.maximum, largest).clamp_min(nvfp4.AMAX_FLOOR)
        return divide(amax, nvfp4.FULL_SCALE)

    def _values(self, stem: str, step: Quantise) -> Iterator[tuple[slice, Tensor]]:
        """Ranges of rows, and their values on the device: bf16 or fp32 [rows, K]."""
        (n, k), unit = step.shape, step.storage.decoder.block[0]
        height = max(PIECE[self._device.type] // (k * unit), 1) * unit
        for start in range(0, n, height):
            rows = slice(start, min(start + height, n))
            pieces = _Pieces(self._reader, stem, step.storage, rows, self._device)
            if step.storage is Storage.MXFP4:
                scale = ue8m0.as_bytes(pieces.piece("scale"))
                yield rows, MxFp4Tensor(pieces.piece("weight").view(torch.uint8), scale).dequantize()
                continue
            values = step.storage.decoder.decode(pieces)
            assert isinstance(values, Tensor), step  # what is NVFP4 is never quantised again
            yield rows, values


class _Pieces:
    """Rows of a matrix's stored tensors, on a device (:class:`.decoders.Pieces`)."""

    def __init__(self, reader: CheckpointReader, stem: str, storage: Storage, rows: slice, device: torch.device):
        self._reader, self._stem, self._decoder = reader, stem, storage.decoder
        self._rows, self._device = (None if rows == slice(None) else rows), device

    def piece(self, part: str) -> Tensor:
        found = self._decoder.part(part)
        assert found is not None, part
        return self._reader.part(self._stem, found, self._rows).to(self._device)

    def whole(self, part: str) -> Tensor:
        found = self._decoder.part(part)
        assert found is not None, part
        return self._reader.part(self._stem, found).to(self._device)


def _sum_of_squares(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x, dtype=torch.float64).square()
