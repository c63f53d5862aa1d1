"""Ranks as the decoder sees them: what each holds of the model, and collectives by name.

Loader, GEMMs, routing and forecast ask :class:`Ownership` alone which heads and experts a rank holds.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nvfp4_sgl.config import ModelConfig
from nvfp4_sgl.errors import ConfigError
from nvfp4_sgl.formats.blocks import NVFP4

if TYPE_CHECKING:
    from torch import Tensor


SEQUENCE_PARALLEL_TOKENS = 2048
"""Tokens from which a pass is divided. Two ranks then save 44 µs a site (``launch/results/tunings_h200.md``); with
fewer tokens the host, which launches one more collective, would delay them."""


class Collective(enum.Enum):
    """A place where ranks' partial results are summed."""

    ATTENTION_OUTPUT = "attention output"
    EXPERT_OUTPUT = "expert output"


def _alone(collective: Collective, part: Tensor) -> Tensor:
    return part


@dataclass(frozen=True)
class SequenceParallel:
    """The collectives of passes whose tokens are divided over the ranks between sublayers (:mod:`..model.tokens`).

    Attributes:
        reduce_scatter: sums the ranks' [size * n, d], at the named place; of the sum this rank's [n, d].
        all_gather: the ranks' [n, ...], one after the other: [size * n, ...].
        least_tokens: tokens of the smallest pass that is divided.
    """

    reduce_scatter: Callable[[Collective, Tensor], Tensor]
    all_gather: Callable[[Tensor], Tensor]
    least_tokens: int = SEQUENCE_PARALLEL_TOKENS


@dataclass(frozen=True)
class Slot:
    """Memory of all ranks where their parts of one sum meet.

    Attributes:
        parts: int16 [ranks, capacity, d] in this rank's memory: the bits of each rank's part.
        outboxes: bf16 [capacity, d], a rank's each, this rank's first: memory that this rank's part is stored in.
    """

    parts: Tensor
    outboxes: Sequence[Tensor]

    def places(self, tokens: int) -> list[Tensor]:
        """Memory for the parts of ``tokens`` tokens: [tokens, d] of each rank, this rank's first."""
        return [outbox[:tokens] for outbox in self.outboxes]


@dataclass(frozen=True)
class Exchange:
    """Sums over ranks without a collective: kernels store parts in every rank's memory, the next mHC site adds them.

    A slot is used again after the other one, as the places of a layer alternate.

    Attributes:
        tokens: of the largest pass whose parts have room.
    """

    slots: Mapping[Collective, Slot]
    tokens: int


@dataclass(frozen=True)
class ExpertShare:
    """A rank's share of the experts of a layer.

    Attributes:
        routed: the routed experts, in the order of its groups.
        inner: of each of them, the part of the intermediate dimension. shared: that of the shared expert.
    """

    routed: tuple[int, ...]
    inner: range
    shared: range


@dataclass(frozen=True)
class Ownership:
    """The share of one of ``size`` ranks: an equal part of heads, o-groups and the experts' intermediate dimension.

    Everything that all heads read (wq_a, wkv, compressors, indexer, router) is replicated, and so is the cache. A
    subclass may hold something else, such as whole experts: sublayers' outputs are sums over ranks either way.
    """

    rank: int = 0
    size: int = 1

    def share(self, total: int) -> range:
        """This rank's contiguous part of ``total``."""
        part = total // self.size
        return range(self.rank * part, (self.rank + 1) * part)

    def heads(self, config: ModelConfig) -> range:
        """Attention heads."""
        return self.share(config.num_attention_heads)

    def o_groups(self, config: ModelConfig) -> range:
        """Groups of the attention output, those of :meth:`heads`."""
        return self.share(config.o_groups)

    def experts(self, config: ModelConfig) -> ExpertShare:
        """Experts of each layer."""
        inner = self.share(config.moe_intermediate_size)
        return ExpertShare(tuple(range(config.n_routed_experts)), inner, inner)

    def check(self, config: ModelConfig) -> None:
        """:class:`ConfigError` if the model cannot be split over ``size`` ranks."""
        for field, multiple in (("o_groups", 1), ("num_attention_heads", 1), ("moe_intermediate_size", NVFP4.columns)):
            value = getattr(config, field)
            if value % (self.size * multiple):
                raise ConfigError(
                    f"--tp-size {self.size}: {field} is {value}, expected a multiple of {self.size * multiple};"
                    " use a smaller --tp-size"
                )


@dataclass(frozen=True)
class TensorParallel(Ownership):
    """This process's share of the model, and how results are exchanged.

    Attributes:
        all_reduce: sums a rank's partial result over the ranks, at the named place.
        sequence: how long passes are divided; without it every rank keeps all tokens' residual streams.
        exchange: how short passes are summed where kernels can; without it by ``all_reduce``.
    """

    all_reduce: Callable[[Collective, Tensor], Tensor] = _alone
    sequence: SequenceParallel | None = None
    exchange: Exchange | None = None


def lone_rank(size: int) -> TensorParallel:
    """The last of ``size`` ranks, which exchanges nothing: it launches what a rank launches, with meaningless results.

    The last, because where tokens are divided only its number of them may be any.
    """
    rank = size - 1

    def own_rows(collective: Collective, part: Tensor) -> Tensor:
        return part.unflatten(0, (size, -1))[rank]

    def repeated(own: Tensor) -> Tensor:
        return own.repeat(size, *[1] * (own.dim() - 1))

    return TensorParallel(rank, size, sequence=SequenceParallel(own_rows, repeated))
