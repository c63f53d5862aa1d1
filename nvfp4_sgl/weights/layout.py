"""Matrices of a layer that read the same activation, and the part of each that a rank holds. The one list of both;
:mod:`.gemms` has their sizes.

Matrices that read the same activation are merged; each keeps its own global scale. Heads, o-groups and experts are
split over ranks (:mod:`.parallel`).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from nvfp4_sgl.config import LayerSpec, ModelConfig
from nvfp4_sgl.weights.parallel import ExpertShare, Ownership
from nvfp4_sgl.weights.source import Shard, WeightSource


@dataclass(frozen=True)
class AttentionMatrices:
    """The GEMMs of an attention layer on one rank.

    Attributes:
        from_x: read the layer's input: wq_a, wkv; wkv and wgate of the compressor; wkv and wgate of the indexer's.
        index_weights: the indexer's head weights, which read the input too and are never quantised; CSA layers only.
        from_q: read the normalised q_lora: this rank's heads of wq_b; the indexer's wq_b.
        wo_a: block-diagonal over this rank's ``groups`` o-groups.
        wo_b: this rank's columns; its result is a partial sum.
    """

    from_x: tuple[Shard, ...]
    index_weights: Shard | None
    from_q: tuple[Shard, ...]
    wo_a: Shard
    wo_b: Shard
    groups: int


def attention_matrices(config: ModelConfig, layer: LayerSpec, owner: Ownership) -> AttentionMatrices:
    """The GEMMs of the attention of ``layer``."""
    stem = f"{layer.stem}.attn"
    from_x = ["wq_a", "wkv"]
    if layer.compresses:
        from_x += ["compressor.wkv", "compressor.wgate"]
    from_q = [Shard(f"{stem}.wq_b", rows=_rows(owner.heads(config), config.head_dim))]
    index_weights = None
    if layer.selects:
        from_x += ["indexer.compressor.wkv", "indexer.compressor.wgate"]
        from_q.append(Shard(f"{stem}.indexer.wq_b"))
        index_weights = Shard(f"{stem}.indexer.weights_proj")
    o_groups = owner.o_groups(config)
    o_rows = _rows(o_groups, config.o_lora_rank)
    return AttentionMatrices(
        from_x=tuple(Shard(f"{stem}.{name}") for name in from_x),
        index_weights=index_weights,
        from_q=tuple(from_q),
        wo_a=Shard(f"{stem}.wo_a", rows=o_rows),
        wo_b=Shard(f"{stem}.wo_b", cols=o_rows),
        groups=len(o_groups),
    )


def _rows(part: range, each: int = 1) -> slice:
    """The rows of ``part``, each of which has ``each``."""
    return slice(part.start * each, part.stop * each)


LAYERS_REMEMBERED = 64
"""Layers whose experts' names are kept: all of a released model, 12 MB."""


@dataclass(frozen=True)
class ExpertMatrices:
    """The GEMMs of one expert on one rank: gate and up rows, gate first; columns of down."""

    gate_up: tuple[Shard, Shard]
    down: Shard

    @property
    def shards(self) -> tuple[Shard, Shard, Shard]:
        """All three."""
        return (*self.gate_up, self.down)


def expert_matrices(config: ModelConfig, layer: LayerSpec, owner: Ownership) -> list[ExpertMatrices]:
    """Matrices of the rank's routed experts in the order of its groups, then of the shared expert."""
    return list(_expert_matrices(f"{layer.stem}.ffn", owner.experts(config)))


@functools.lru_cache(maxsize=LAYERS_REMEMBERED)
def _expert_matrices(stem: str, share: ExpertShare) -> tuple[ExpertMatrices, ...]:
    """Remembered, because loader, checks, forecast and planner each ask for the tens of thousands of a model."""

    def expert(name: str, inner: slice) -> ExpertMatrices:
        gate_up = Shard(f"{name}.w1", rows=inner), Shard(f"{name}.w3", rows=inner)
        return ExpertMatrices(gate_up, Shard(f"{name}.w2", cols=inner))

    inner = _rows(share.inner)
    routed = (expert(f"{stem}.experts.{index}", inner) for index in share.routed)
    return (*routed, expert(f"{stem}.shared_experts", _rows(share.shared)))


def held_elsewhere(config: ModelConfig, owner: Ownership) -> frozenset[str]:
    """Names of the matrices of routed experts that are other ranks' alone."""
    others = set(range(config.n_routed_experts)).difference(owner.experts(config).routed)
    return frozenset(
        shard.stem
        for layer in (config.layers() if others else ())
        for index, expert in enumerate(expert_matrices(config, layer, Ownership())[:-1])
        if index in others
        for shard in expert.shards
    )


EXPERTS_AT_ONCE = 8
"""Experts that are read and packed together: 113 MB of Flash's. Kernels are launched for all of them at once, 53 an
expert instead of 148."""


def expert_batches(
    source: WeightSource, matrices: Sequence[ExpertMatrices]
) -> Iterator[tuple[int, Sequence[ExpertMatrices]]]:
    """Experts in order, a few at a time, each time with the index of the first; the next are read ahead meanwhile."""
    batches = [matrices[first : first + EXPERTS_AT_ONCE] for first in range(0, len(matrices), EXPERTS_AT_ONCE)]

    def expect(batch: Sequence[ExpertMatrices]) -> None:
        shards = (shard for expert in batch for shard in expert.shards)
        source.expect([(shard.stem, shard.rows, shard.cols) for shard in shards])

    first = 0
    for number, batch in enumerate(batches):
        if number == 0:
            expect(batch)
        if number + 1 < len(batches):
            expect(batches[number + 1])
        yield first, batch
        first += len(batch)
