"""Weights of any size, drawn when they are asked for: a layer at true width with no checkpoint behind it."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from nvfp4_sgl.checkpoint.decoders import MatrixRange
from nvfp4_sgl.checkpoint.names import Role, tensor_specs
from nvfp4_sgl.checkpoint.storage import Storage
from nvfp4_sgl.config import ModelConfig
from nvfp4_sgl.formats.mxfp8 import MxFp8Tensor
from nvfp4_sgl.formats.nvfp4 import NvFp4Tensor

CODE_RMS = 2.9
"""Root mean square of E2M1 codes that are all equally likely."""
SCALES = (0x30, 0x3F)
"""E4M3 codes of block scales, 0.5 to 1.875, about 1.1 rms."""
GAINS = {".w1": 3.0, ".w3": 3.0, ".w2": 0.15}
"""Gates and ups whose tails meet the clamp at 10, and what brings SwiGLU's outputs back."""


class RandomSource:
    """A weight source of NVFP4 matrices and bf16 or fp32 tensors, each a function of its name alone.

    Args:
        experts: routed experts that have contents; of the others memory is handed out that nobody has written, which
            costs nothing as long as nobody reads it.
    """

    def __init__(self, config: ModelConfig, experts: Collection[int]):
        self._specs, self._experts = tensor_specs(config), frozenset(experts)

    def storage(self, stem: str) -> Storage:
        spec = self._specs.get(stem)
        return Storage.NVFP4 if spec is not None and spec.role.is_matrix else Storage.PLAIN

    def expect(self, matrices: Sequence[MatrixRange]) -> None:
        """Nothing: there are no files."""

    def is_present(self, stem: str) -> bool:
        """Whether a matrix has contents."""
        parts = stem.split(".")
        return "experts" not in parts or int(parts[parts.index("experts") + 1]) in self._experts

    def read(self, name: str, rows: slice | None = None, cols: slice | None = None) -> Tensor:
        known = self._specs.get(name) or self._specs[name.removesuffix(".weight")]
        x = torch.randn(known.shape, generator=_generator(name))
        if known.role is Role.FP32:
            if name.endswith("_fn"):
                x *= x.shape[-1] ** -0.5
            x *= 0.5
        elif x.dim() == 1:
            x = (1 + 0.1 * x).bfloat16()
        else:
            x = (x * x.shape[-1] ** -0.5).bfloat16()
        return x if rows is None else x[rows]

    def read_matrix(self, stem: str, rows: slice | None = None, cols: slice | None = None) -> NvFp4Tensor | Tensor:
        if not self.storage(stem).is_nvfp4:
            return self.read(f"{stem}.weight", rows, cols)
        assert rows is None or (rows.start, rows.stop) == (0, self._specs[stem].shape[0]), "one rank only"
        n, k = self._specs[stem].shape
        if not self.is_present(stem):
            scales = torch.empty(n, k // 16, dtype=torch.uint8).view(torch.float8_e4m3fn)
            return NvFp4Tensor(torch.empty(n, k // 2, dtype=torch.uint8), scales, torch.ones(()))
        generator = _generator(stem)
        codes = torch.randint(0, 256, (n, k // 2), generator=generator, dtype=torch.uint8)
        scales = torch.randint(SCALES[0], SCALES[1] + 1, (n, k // 16), generator=generator, dtype=torch.uint8)
        gain = GAINS.get(stem[-3:], 1.0)
        return NvFp4Tensor(codes, scales.view(torch.float8_e4m3fn), torch.tensor(gain * k**-0.5 / (CODE_RMS * 1.1)))

    def read_mxfp8(self, stem: str, rows: slice | None = None, cols: slice | None = None) -> MxFp8Tensor:
        raise NotImplementedError(f"{stem}: all matrices are NVFP4")


def _generator(name: str) -> torch.Generator:
    return torch.Generator().manual_seed(int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little") >> 1)
