"""The CPU reference's code on tensors of another device, where full widths take it seconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from nvfp4_sgl.standalone import Standalone


class DeviceReference(Standalone):
    """A :class:`Standalone` of the CPU target whose weights, caches and activations are on ``device``.

    What the references make without naming a device, they make there. Products are fp32's: torch's setting for those
    must be "highest".
    """

    def extend(self, tokens: Mapping[int, Sequence[int]]) -> dict[int, Tensor]:
        assert torch.get_float32_matmul_precision() == "highest", "TF32 would round the reference's products"
        with torch.device(self.device):
            return super().extend(tokens)

    def logits(self, hidden: Tensor) -> Tensor:
        """As on the CPU, where no product of bf16 has an fp32 result: fp32 [T, vocab] of values read as fp32."""
        return hidden.float() @ self.head.float().t()
