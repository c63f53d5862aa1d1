"""A checkpoint reader over tensors in memory, fed with a transformers module's state."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from nvfp4_sgl.checkpoint.decoders import MatrixRange
from nvfp4_sgl.checkpoint.storage import Storage
from nvfp4_sgl.formats.mxfp8 import MxFp8Tensor

_MODULE_RENAMES = (
    (r"\bcompressor\.indexer\.scorer\.weights_proj\b", "indexer.weights_proj"),
    (r"\bcompressor\.indexer\.q_b_proj\b", "indexer.wq_b"),
    (r"\bcompressor\.indexer\.", "indexer.compressor."),
    (r"\bkv_norm\b", "norm"),
    (r"^norm\b", "kv_norm"),
    (r"\bposition_bias$", "ape"),
    (r"compressor\.kv_proj\b", "compressor.wkv"),
    (r"compressor\.gate_proj\b", "compressor.wgate"),
    (r"^q_a_proj\b", "wq_a"),
    (r"^q_a_norm\b", "q_norm"),
    (r"^q_b_proj\b", "wq_b"),
    (r"^kv_proj\b", "wkv"),
    (r"^o_a_proj\b", "wo_a"),
    (r"^o_b_proj\b", "wo_b"),
    (r"^sinks$", "attn_sink"),
    (r"\be_score_correction_bias$", "bias"),
    (r"shared_experts\.gate_proj\b", "shared_experts.w1"),
    (r"shared_experts\.up_proj\b", "shared_experts.w3"),
    (r"shared_experts\.down_proj\b", "shared_experts.w2"),
)


def original_names(module: nn.Module, stem: str) -> dict[str, Tensor]:
    """State of a transformers attention or MoE module under DeepSeek's names below ``stem``."""
    named: dict[str, Tensor] = {}
    for key, value in module.state_dict().items():
        if key.endswith("experts.gate_up_proj"):
            for expert, both in enumerate(value):
                gate, up = both.chunk(2)
                named[f"{stem}.experts.{expert}.w1.weight"] = gate
                named[f"{stem}.experts.{expert}.w3.weight"] = up
        elif key.endswith("experts.down_proj"):
            for expert, down in enumerate(value):
                named[f"{stem}.experts.{expert}.w2.weight"] = down
        elif not key.endswith("inv_freq"):
            name = key
            for pattern, replacement in _MODULE_RENAMES:
                name = re.sub(pattern, replacement, name)
            named[f"{stem}.{name}"] = value
    return named


class MemoryReader:
    """A weight source of plain tensors."""

    def __init__(self, tensors: dict[str, Tensor]):
        self._tensors = tensors

    def expect(self, matrices: Sequence[MatrixRange]) -> None:
        """Nothing: there are no files."""

    def storage(self, stem: str) -> Storage:
        assert f"{stem}.weight" in self._tensors, stem
        return Storage.PLAIN

    def read(self, name: str, rows: slice | None = None, cols: slice | None = None) -> Tensor:
        tensor = self._tensors[name].detach()
        if rows is not None:
            tensor = tensor[rows]
        return (tensor if cols is None else tensor[:, cols]).clone()

    def read_matrix(self, stem: str, rows: slice | None = None, cols: slice | None = None) -> Tensor:
        return self.read(f"{stem}.weight", rows, cols)

    def read_mxfp8(self, stem: str, rows: slice | None = None, cols: slice | None = None) -> MxFp8Tensor:
        raise NotImplementedError(f"{stem}: all matrices are plain")


def randomise(module: nn.Module, seed: int) -> None:
    """Fill a transformers module with fan-in scaled normals, outliers in the matrices, biases and sinks of order 1."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, value in [*module.named_parameters(), *module.named_buffers()]:
            leaf = name.rsplit(".", 1)[-1]
            if leaf.endswith("inv_freq"):
                continue
            if leaf == "tid2eid":
                order = torch.rand(value.shape[0], 64, generator=generator).argsort(-1) % value.max().clamp(min=8)
                value.copy_(order[:, : value.shape[1]])
                continue
            value.normal_(generator=generator)
            if value.dim() == 1:
                if "norm" in name:
                    value.mul_(0.1).add_(1.0)
                continue
            value.mul_(value.shape[-1] ** -0.5 if leaf not in ("position_bias",) else 0.5)
