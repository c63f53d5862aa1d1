"""Draws random weights, for ``--load-format dummy``: full-size servers, measurements, tests.

:class:`DummyReader` hands out tensors of :mod:`.random_weights` as :class:`CheckpointReader` does those of files: what
is behind a reader is the same. A tensor is a function of seed, name and position alone (:mod:`.random_words`): of any
size, for any rank, on any device.

Codes are random bytes, and nothing is ever quantised. Magnitudes are those of tiny checkpoints
(:mod:`.tiny_weights`), by which activations stay of order 1 through all layers; routers are balanced.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from nvfp4_sgl.checkpoint.inventory import Inventory
from nvfp4_sgl.checkpoint.reader import CheckpointReader, bounds
from nvfp4_sgl.checkpoint.safetensors_header import Entry
from nvfp4_sgl.checkpoint.stored_files import DTYPES
from nvfp4_sgl.formats import ue8m0
from nvfp4_sgl.synthetic.random_words import key_of, normal_numbers, random_bytes, words
from nvfp4_sgl.synthetic.tiny_weights import fp32_values, gain

SEED = 0
"""Seed of the weights that are served."""
MAX_WORDS_AT_ONCE = 1 << 24
"""Words drawn in one piece: 128 MiB, and as much again on the way."""

CODE_RMS = (2 * (0.5**2 + 1 + 1.5**2 + 2**2 + 3**2 + 4**2 + 6**2) / 16) ** 0.5
"""Root mean square of E2M1 codes that are all equally likely."""
BLOCK_SCALE_CODES = range(0x6F, 0x7F)
"""E4M3 codes of block scales, all equally likely: 120 to 448, as where a global scale is a matrix's maximum / 2688."""
GLOBAL_SCALE_SPREAD = 0.25
"""A global scale is off the one that its gain asks for by a factor from 2^-0.25 to 2^0.25, so that no two are equal."""
FP8_MAGNITUDE_CODES = range(0x58, 0x78)
"""E4M3 codes without sign, all equally likely: 16 to 240."""
ROUTER_BIAS_GAIN = 0.05
"""Over a tiny checkpoint's bias. Scores of experts deviate by about 0.3: its own 0.2 would send most tokens to few."""

Draw = Callable[[range, range], Tensor]
"""Rows and columns of a tensor, as stored."""


class DummyReader(CheckpointReader):
    """Draws what :class:`CheckpointReader` would read; its docstrings apply.

    Args:
        inventory: of :func:`.random_weights.dummy_inventory`, verified.
        device: where tensors are made.
        seed: of all tensors.
        say, of_draft: as of the base.
    """

    def __init__(
        self,
        inventory: Inventory,
        device: torch.device | str = "cpu",
        seed: int = SEED,
        say: Callable[[str], None] | None = None,
        *,
        of_draft: bool = False,
    ):
        super().__init__(inventory, say=say, of_draft=of_draft)
        self._device, self._seed = torch.device(device), seed

    def read(self, name: str, rows: slice | None = None, cols: slice | None = None) -> Tensor:
        """Tensor ``name``, or the part of it, in the dtype of its entry. Nothing waits for the device."""
        part = self._drawn_part(name, rows, cols)
        self._count(name, part)
        return part

    def _drawn_part(self, name: str, rows: slice | None, cols: slice | None) -> Tensor:
        entry = self._entry(name)
        if not entry.shape:
            return torch.tensor(self._global_scale(name), dtype=torch.float32, device=self._device)
        row = range(*bounds(entry, name, 0, rows or slice(None)))
        if len(entry.shape) == 1:
            return self._draw(entry, row, range(1))[:, 0]
        return self._draw(entry, row, range(*bounds(entry, name, 1, cols or slice(None))))

    def _draw(self, entry: Entry, rows: range, columns: range) -> Tensor:
        out = torch.empty(len(rows), len(columns), dtype=DTYPES[entry.dtype], device=self._device)
        if out.is_meta:
            return out  # nothing to draw, and 43 layers of it take minutes
        draw, step = self._drawn(entry), max(MAX_WORDS_AT_ONCE // len(columns), 1)
        for start in range(rows.start, rows.stop, step):
            part = range(start, min(start + step, rows.stop))
            out[start - rows.start : part.stop - rows.start] = draw(part, columns)
        return out

    def _drawn(self, entry: Entry) -> Draw:
        """The function that draws a tensor: by its dtype, which tells apart what is stored."""
        name, key = entry.name, key_of(entry.name, self._seed)
        width = entry.shape[1] if len(entry.shape) == 2 else 1
        if entry.dtype in ("U8", "I8", "F8_E4M3", "F8_E8M0"):
            as_stored = self._byte_codes(entry)
            return lambda rows, columns: as_stored(random_bytes(key, rows, columns, width, self._device))
        if entry.dtype == "I64":
            return lambda rows, columns: self._expert_ids(key, rows)[:, columns.start : columns.stop]

        def numbers(rows: range, columns: range) -> Tensor:
            x = normal_numbers(key, rows, columns, width, self._device)
            if entry.dtype == "F32":
                values = fp32_values(name, x, width)
                return values * ROUTER_BIAS_GAIN if name.endswith(".gate.bias") else values
            if len(entry.shape) == 1:
                return 1.0 + 0.1 * x
            return x if name == "embed.weight" else x * (gain(name) * width**-0.5)

        return numbers

    def _byte_codes(self, entry: Entry) -> Callable[[Tensor], Tensor]:
        """Random bytes to stored ones."""
        if entry.dtype in ("U8", "I8"):
            return lambda drawn: drawn.view(DTYPES[entry.dtype])
        if entry.name.endswith(".weight_scale"):
            first, count = BLOCK_SCALE_CODES.start, len(BLOCK_SCALE_CODES)
            return lambda drawn: ((drawn & (count - 1)) + first).view(torch.float8_e4m3fn)
        if entry.dtype == "F8_E4M3":
            first, count = FP8_MAGNITUDE_CODES.start, len(FP8_MAGNITUDE_CODES)
            return lambda drawn: ((drawn & 0x80) + (drawn & (count - 1)) + first).view(torch.float8_e4m3fn)
        exponent, threshold = self._power_scale(entry.name.removesuffix(".scale"))
        return lambda drawn: (exponent + (drawn < threshold).to(torch.uint8)).view(torch.float8_e8m0fnu)

    def _power_scale(self, stem: str) -> tuple[int, int]:
        """(UE8M0 byte, threshold): as many of 256 blocks have twice that scale as give the matrix its rms."""
        weight = self._entry(f"{stem}.weight")
        is_fp8 = weight.dtype == "F8_E4M3"
        width = weight.shape[1] * (1 if is_fp8 else 2)
        rms = _rms_of_codes(FP8_MAGNITUDE_CODES) if is_fp8 else CODE_RMS
        wanted = (gain(stem) * width**-0.5 / rms) ** 2
        exponent = math.floor(math.log2(wanted) / 2)
        share = (wanted / 4.0**exponent - 1) / 3
        return exponent + ue8m0.BIAS, round(share * 256)

    def _global_scale(self, name: str) -> float:
        """``weight_scale_2`` of a matrix."""
        stem = name.removesuffix(".weight_scale_2")
        width = self._entry(f"{stem}.weight").shape[1] * 2
        offset = key_of(name, self._seed)[0] / 2**31 - 1
        rms = CODE_RMS * _rms_of_codes(BLOCK_SCALE_CODES)
        return gain(stem) * width**-0.5 / rms * 2 ** (offset * GLOBAL_SCALE_SPREAD)

    def _expert_ids(self, key: tuple[int, int], rows: range) -> Tensor:
        """int64 [rows, topk]: different experts in every row, all of them equally likely."""
        experts, topk = self._config.n_routed_experts, self._config.num_experts_per_tok
        drawn = words(key, rows, range(topk + 1), topk + 1, self._device)
        stratum = experts // topk
        first = torch.arange(topk, device=self._device) * stratum
        return (drawn[:, :1] % experts + first + drawn[:, 1:] % stratum) % experts


def _rms_of_codes(codes: range) -> float:
    values = torch.arange(codes.start, codes.stop, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    return float(values.square().mean().sqrt())
