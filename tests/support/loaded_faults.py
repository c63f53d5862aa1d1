"""Faults planted in a loaded model of Hopper's ``w4a16``, each in one layer while its block lasts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor

from nvfp4_sgl.config import RopeTable
from nvfp4_sgl.model.contract import Activation
from nvfp4_sgl.model.rope_tables import frequencies
from nvfp4_sgl.ops.rope import apply_rope
from nvfp4_sgl.standalone import Standalone


@contextmanager
def expert_scale_doubled(model: Standalone, layer: int, ids: Sequence[int]) -> Iterator[None]:
    """The global scale of one expert's down projection twice what it is, in a layer that routes by token ids.

    Args:
        ids: tokens of the run; the expert is the one that most of them visit.
    """
    block: Any = model.decoder.layers[layer]
    table: Tensor = block.ffn.route.tid2eid
    visited = table[torch.tensor(ids, device=table.device)]
    expert = int(visited.flatten().bincount().argmax())
    scale: Tensor = block.ffn.experts.gemms.w2.scale.data[expert]
    scale.mul_(2)
    try:
        yield
    finally:
        scale.div_(2)


@contextmanager
def other_rope_table(model: Standalone, layer: int, ids: Sequence[int]) -> Iterator[None]:
    """Keys and queries of a window-only layer rotated by the table of compressed layers."""
    attention: Any = model.decoder.layers[layer].attn
    modules = (attention.prepare, attention.attend)
    assert all(module._table is RopeTable.WINDOW for module in modules)
    for module in modules:
        module._table = RopeTable.COMPRESSED
    try:
        yield
    finally:
        for module in modules:
            module._table = RopeTable.WINDOW


@contextmanager
def no_inverse_rope(model: Standalone, layer: int, ids: Sequence[int]) -> Iterator[None]:
    """The attention output of a layer left rotated by its query's position: rotated again behind the kernel."""
    attend: Any = model.decoder.layers[layer].attn.attend
    turns = frequencies(model.config, attend._table).to(model.device)

    def rotate_again(module: object, inputs: tuple[Any, ...], output: Activation) -> Activation:
        values, positions = output.require_values(), inputs[1].plan.batch.positions
        heads = values.view(len(values), -1, model.config.head_dim)
        return Activation(apply_rope(heads, positions, turns).view(values.shape))

    hook = attend.register_forward_hook(rotate_again)
    try:
        yield
    finally:
        hook.remove()


Fault = Callable[[Standalone, int, Sequence[int]], AbstractContextManager[None]]

FAULTS: dict[str, tuple[Fault, int]] = {
    "global scale of one expert doubled": (expert_scale_doubled, 0),
    "RoPE of the other table": (other_rope_table, 0),
    "no inverse RoPE": (no_inverse_rope, 2),
}
"""Each with the layer that it is planted in."""
