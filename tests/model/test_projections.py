"""Merged matrices: a GEMM for each part of the target's rule, and columns in the order of the matrices."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from nvfp4_sgl.checkpoint.storage import Storage
from nvfp4_sgl.model.contract import Activation, Form
from nvfp4_sgl.targets import target
from nvfp4_sgl.targets.fused.gemm_backend import Backends
from nvfp4_sgl.targets.fused.projections import Projection
from nvfp4_sgl.weights.source import Shard

ROWS = {"a": 3, "b": 1, "c": 4, "d": 2, "e": 5}
STORAGES = {"a": "NVFP4", "b": "FP8", "c": "NVFP4", "d": "PLAIN", "e": "FP8"}


class Recorded(torch.nn.Module):
    """A GEMM whose columns hold the numbers of the matrices that they are of."""

    def __init__(self, takes: Form, shards: Sequence[Shard]):
        super().__init__()
        self.takes, self.sizes = takes, [ROWS[shard.stem] for shard in shards]
        self.columns = torch.cat([torch.full((ROWS[shard.stem],), float(ord(shard.stem))) for shard in shards])

    def forward(self, x: Activation, dtype: torch.dtype, features: int | None = None) -> Tensor:
        return self.columns[:features].to(dtype).expand(2, -1)


class Recording:
    """A backend of one kind of operands."""

    def __init__(self, takes: Form):
        self.takes, self.loaded = takes, list[str]()

    def load(self, context: Any, shards: Sequence[Shard], groups: int | None = None) -> Recorded:
        self.loaded.append("".join(shard.stem for shard in shards))
        return Recorded(self.takes, shards)


@pytest.mark.parametrize(
    ("of", "loaded"),
    [
        (target.SM100, {"nvfp4": ["ac"], "mxfp8": ["be"], "bf16": ["d"]}),
        (target.HOPPER, {"nvfp4": [], "fp8": [], "bf16": ["abcde"]}),
    ],
    ids=["by kind", "together"],
)
def test_columns_are_in_the_order_of_the_matrices(of: target.Descriptor, loaded: dict[Any, list[str]]) -> None:
    kinds: dict[Any, Recording] = {kind: Recording(Form.NVFP4 if kind == "nvfp4" else Form.VALUES) for kind in loaded}
    backends = Backends(of, dense=kinds, shared={}, experts={}, expert_token_tile=lambda rows, groups: 8)
    context: Any = SimpleNamespace(source=SimpleNamespace(storage=lambda stem: Storage[STORAGES[stem]]))
    projection = Projection(backends, context, [Shard(stem) for stem in ROWS])
    assert {kind: backend.loaded for kind, backend in kinds.items()} == loaded
    for dtype, columns in (
        (torch.float32, projection.multiply(Activation(), torch.float32)),
        (torch.bfloat16, projection(Activation())),
    ):
        for (stem, rows), found in zip(ROWS.items(), columns, strict=True):
            assert torch.equal(found, torch.full((2, rows), float(ord(stem)), dtype=dtype))
    assert projection.takes == (Form.VALUES | Form.NVFP4 if loaded["nvfp4"] else Form.VALUES)
    for first in range(1, len(ROWS) + 1):
        found = projection(Activation(), first)
        assert all(map(torch.equal, found, columns[:first])) and len(found) == first
