"""The GEMMs of a model's layers on one rank, with their sizes. The one inventory of them.

Which matrices read the same activation, and what a rank holds of each, is in :mod:`.layout`, by which the loader reads
them. Their sizes are those of the checkpoint's tensors (:mod:`nvfp4_sgl.checkpoint.names`). A :class:`MergeRule` says
which of them a target computes at once. Kernels, memory, requirements and benchmarks all follow from the result.

Router, index weights and LM head are left out: they are never quantised.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from nvfp4_sgl.checkpoint.names import TensorSpec, attention_specs
from nvfp4_sgl.config import LayerSpec, ModelConfig
from nvfp4_sgl.weights.layout import ExpertMatrices, attention_matrices, expert_matrices
from nvfp4_sgl.weights.parallel import ExpertShare, Ownership
from nvfp4_sgl.weights.source import Shard

OperandKind = Literal["nvfp4", "mxfp8", "fp8", "bf16"]
"""What a GEMM multiplies: weights and activations of one kind on SM100, weights of a kind and bf16 activations on
Hopper. "mxfp8" is SM100's, "fp8" Hopper's. GEMMs of bf16 are a library's."""
Output = Literal["bf16", "fp32", "nvfp4"]
KindOf = Callable[[str], OperandKind]
"""The kind of operands of a matrix's GEMM, by the matrix's name without suffix."""


def all_nvfp4(stem: str) -> OperandKind:
    """:data:`KindOf` of a checkpoint whose matrices are all NVFP4."""
    return "nvfp4"


class Part(enum.Enum):
    """The part of a layer that a GEMM belongs to."""

    ATTENTION = "attention"
    EXPERTS = "experts"


@dataclass(frozen=True)
class GemmSpec:
    """``groups`` GEMMs of [tokens, k] by [features, k]; with ``gated`` a gate and an up matrix each.

    Two are equal where the same kernels compute both: the layer and its shards do not count.

    Attributes:
        name: the checkpoint's names of what is merged, within the layer's part.
        experts_per_token: 0 for GEMMs of all tokens; else how many of the groups each token goes through.
        shared: the last of the groups is one that every token goes through, the shared expert.
        output: what is written; "nvfp4" is quantised again for the GEMM that follows.
        kind: of its operands.
        shards: the matrices, in the order of groups and rows. shard_rows: this rank's weight rows of each.
    """

    name: str
    features: int
    k: int
    groups: int = 1
    gated: bool = False
    experts_per_token: int = 0
    shared: bool = False
    output: Output = "bf16"
    kind: OperandKind = "nvfp4"
    part: Part = Part.ATTENTION
    shards: tuple[Shard, ...] = field(default=(), compare=False, repr=False)
    shard_rows: tuple[int, ...] = field(default=(), compare=False, repr=False)

    @property
    def sends(self) -> bool:
        """Whether its kernel can store a rank's part of a sum in every rank's memory."""
        return self.name == "wo_b" and self.kind == "nvfp4" and self.output == "bf16"

    @property
    def rows(self) -> int:
        """Weight rows of a group."""
        return self.features * (2 if self.gated else 1)

    @property
    def elements(self) -> int:
        """Weights of all groups."""
        return self.groups * self.rows * self.k


@dataclass(frozen=True)
class DraftMatrices:
    """Matrices that the passes of a draft multiply, instead of those of the decoder's layers.

    Attributes:
        stages: its blocks. projections: the matrices in front of them.
        by_stream: names of the projections that read every residual stream of a token.
        block: tokens that it guesses at once; 0 for one after the other.
    """

    stages: int
    projections: tuple[TensorSpec, ...]
    by_stream: tuple[str, ...] = ()
    block: int = 0


@dataclass(frozen=True)
class MergeRule:
    """A target's rule for merging matrices that read the same activation into GEMMs.

    Attributes:
        by_kind: one GEMM for each kind of operands. Otherwise one for all: of their kind if that is one, else of bf16;
            then routed experts are also bf16, the shared one with them, unless all of a layer are NVFP4.
        gated_alone: whether SwiGLU is part of the GEMM of gate and up of a shared expert that runs apart.
    """

    by_kind: bool
    gated_alone: bool

    def split(self, kinds: Sequence[OperandKind]) -> list[tuple[OperandKind, list[int]]]:
        """The GEMMs of matrices of these ``kinds``: what each multiplies, and the indices of its matrices."""
        if not self.by_kind:
            return [(common(kinds), list(range(len(kinds))))]
        members: dict[OperandKind, list[int]] = {}
        for index, kind in enumerate(kinds):
            members.setdefault(kind, []).append(index)
        return list(members.items())

    def experts(self, routed: Iterable[OperandKind], shared: Iterable[OperandKind]) -> tuple[OperandKind, OperandKind]:
        """The kinds of a layer's routed experts and of its shared one.

        A target that merges by kind takes routed experts in NVFP4 alone, and a shared one whose matrices are of a kind.
        """
        if not self.by_kind and common(routed) != "nvfp4":
            return "bf16", "bf16"
        return "nvfp4", common(shared)

    @staticmethod
    def groups_shared(routed: OperandKind, shared: OperandKind, share: ExpertShare) -> bool:
        """Whether the shared expert is one more group: GEMMs of a kind, and of a size on the rank."""
        return routed == shared and len(share.inner) == len(share.shared)


BY_KIND = MergeRule(by_kind=True, gated_alone=True)
"""SM100's."""
TOGETHER = MergeRule(by_kind=False, gated_alone=False)
"""Hopper's with bf16 activations."""


def common(kinds: Iterable[OperandKind]) -> OperandKind:
    """The kind of all ``kinds`` if they are one, else bf16."""
    found = set(kinds)
    return found.pop() if len(found) == 1 else "bf16"


def launched_gemms(
    config: ModelConfig,
    owner: Ownership | None = None,
    kind_of: KindOf = all_nvfp4,
    rule: MergeRule = BY_KIND,
    stage: range | None = None,
) -> list[GemmSpec]:
    """The GEMMs that a pass through the layers of a stage launches on a rank, in order.

    Args:
        owner: what the rank holds, the whole model unless given.
        stage: layers, all unless given.

    Raises:
        ConfigError: the model cannot be split so.
    """
    owner = owner or Ownership()
    owner.check(config)
    return [
        gemm
        for layer in config.layers(stage)
        for part in (_attention, _experts)
        for gemm in part(config, layer, owner, kind_of, rule)
    ]


def draft_gemms(
    config: ModelConfig,
    projections: Sequence[TensorSpec],
    stages: int,
    owner: Ownership,
    kind_of: KindOf = all_nvfp4,
    rule: MergeRule = BY_KIND,
) -> list[GemmSpec]:
    """The GEMMs of a draft: of each of its blocks, and of the matrices in front of them.

    Args:
        projections: these matrices, each of which is a GEMM of its own, whole on every rank.

    Raises:
        ConfigError: the model cannot be split so.
    """
    owner.check(config)
    before = [_projection(spec, kind_of(spec.name)) for spec in projections]
    blocks = [config.draft_layer(index) for index in range(stages)]
    return before + [
        gemm
        for layer in blocks
        for part in (_attention, _experts)
        for gemm in part(config, layer, owner, kind_of, rule)
    ]


def without_index_queries(gemm: GemmSpec) -> GemmSpec:
    """The GEMM of a pass that scores nothing; any that multiplies no index queries as it is."""
    if len(gemm.shards) < 2 or not gemm.shards[-1].stem.endswith(".indexer.wq_b"):
        return gemm
    names, rows = gemm.name.rpartition(" + ")[0], gemm.shard_rows[:-1]
    return replace(gemm, name=names, features=sum(rows), shards=gemm.shards[:-1], shard_rows=rows)


def _projection(spec: TensorSpec, kind: OperandKind) -> GemmSpec:
    (rows, k), name, shards = spec.shape, spec.name.rpartition(".")[2], (Shard(spec.name),)
    return GemmSpec(name, rows, k, output="fp32", kind=kind, shards=shards, shard_rows=(rows,))


def step_gemms(
    config: ModelConfig, ranks: int = 1, kind_of: KindOf = all_nvfp4, rule: MergeRule = BY_KIND
) -> Counter[GemmSpec]:
    """:func:`launched_gemms` on one of ``ranks``, each with the number of its layers.

    Raises:
        ConfigError: the model cannot be split so.
    """
    return Counter(launched_gemms(config, Ownership(size=ranks), kind_of, rule))


def distinct_gemms(
    config: ModelConfig, ranks: int = 1, kind_of: KindOf = all_nvfp4, rule: MergeRule = BY_KIND
) -> list[GemmSpec]:
    """:func:`launched_gemms` on one of ``ranks``, each once.

    Raises:
        ConfigError: the model cannot be split so.
    """
    return list(step_gemms(config, ranks, kind_of, rule))


def _attention(
    config: ModelConfig, layer: LayerSpec, owner: Ownership, kind_of: KindOf, rule: MergeRule
) -> Iterator[GemmSpec]:
    stem = f"{layer.stem}.attn"
    shapes = {spec.name: spec.shape for spec in attention_specs(config, stem, layer.kind)}
    matrices = attention_matrices(config, layer, owner)

    def gemms(shards: Sequence[Shard], groups: int = 1, output: Output = "bf16") -> Iterator[GemmSpec]:
        for kind, members in rule.split([kind_of(shard.stem) for shard in shards]):
            merged = tuple(shards[index] for index in members)
            rows = tuple(_length(shard.rows, shapes[shard.stem][0]) for shard in merged)
            yield GemmSpec(
                " + ".join(shard.stem.removeprefix(f"{stem}.") for shard in merged),
                sum(rows) // groups,
                _length(merged[0].cols, shapes[merged[0].stem][1]),
                groups,
                output=output,
                kind=kind,
                shards=merged,
                shard_rows=rows,
            )

    yield from gemms(matrices.from_x, output="fp32")
    yield from gemms(matrices.from_q)
    yield from gemms([matrices.wo_a], matrices.groups)
    yield from gemms([matrices.wo_b])


def _length(part: slice | None, total: int) -> int:
    return total if part is None else int(part.stop - part.start)


def _experts(
    config: ModelConfig, layer: LayerSpec, owner: Ownership, kind_of: KindOf, rule: MergeRule
) -> list[GemmSpec]:
    *routed, shared = expert_matrices(config, layer, owner)
    share = owner.experts(config)
    of_routed, kind = rule.experts(
        (kind_of(shard.stem) for expert in routed for shard in expert.shards),
        (kind_of(shard.stem) for shard in shared.shards),
    )
    if rule.groups_shared(of_routed, kind, share):
        return _grouped(config, share, [*routed, shared], shared=True, kind=kind)
    inner, d = len(share.shared), config.hidden_size
    gated, features = (True, inner) if rule.gated_alone else (False, 2 * inner)
    return [
        *_grouped(config, share, routed, shared=False, kind=of_routed),
        GemmSpec(
            "shared_experts.w1 + w3", features, d,
            gated=gated, kind=kind, part=Part.EXPERTS, shards=shared.gate_up, shard_rows=(inner, inner),
        ),
        GemmSpec(
            "shared_experts.w2", d, inner,
            kind=kind, part=Part.EXPERTS, shards=(shared.down,), shard_rows=(d,),
        ),
    ]  # fmt: skip


def _grouped(
    config: ModelConfig,
    share: ExpertShare,
    experts: Sequence[ExpertMatrices],
    *,
    shared: bool,
    kind: OperandKind,
) -> list[GemmSpec]:
    """The GEMMs of experts that are groups of one; the shared expert is the last, if it is among them."""
    d, inner = config.hidden_size, len(share.inner)
    groups, visits = len(experts), config.num_experts_per_tok + shared
    gate_up = tuple(shard for expert in experts for shard in expert.gate_up)
    down = tuple(expert.down for expert in experts)
    return [
        GemmSpec(
            "experts.w1 + w3", inner, d, groups, True, visits, shared, "nvfp4", kind,
            Part.EXPERTS, gate_up, (inner,) * len(gate_up),
        ),
        GemmSpec(
            "experts.w2", d, inner, groups, False, visits, shared, "bf16", kind,
            Part.EXPERTS, down, (d,) * len(down),
        ),
    ]  # fmt: skip
