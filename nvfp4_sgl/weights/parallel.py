"""Tensor parallelism as the decoder sees it: a rank, a size, and collectives by name."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nvfp4_sgl.config import ModelConfig
from nvfp4_sgl.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor


class Collective(enum.Enum):
    """Where ranks exchange values; each sums the ranks' partial results."""

    ATTENTION_OUTPUT = "attention output"
    EXPERT_OUTPUT = "expert output"


@dataclass(frozen=True)
class PartialSum:
    """A rank's part of a sum that the mHC site which reads it forms by itself.

    Attributes:
        part: [T, d]. slot: where the ranks' parts meet; the target's own.
    """

    part: Tensor
    slot: Any


def unsummed(collective: Collective, part: Tensor) -> Tensor:
    """The sum of one rank, and of ranks that only find out which kernels they need."""
    return part


@dataclass(frozen=True)
class TensorParallel:
    """This process's share of the model.

    Heads, o-groups and the experts' intermediate dimension are split; everything that all heads read (wq_a,
    wkv, compressors, indexer, router) is replicated, and so is the cache.

    Attributes:
        all_reduce: sums a rank's partial result over the ranks, at the named place, or leaves that to the site behind
            it. Places take turns: attention, experts, attention, ...
    """

    rank: int = 0
    size: int = 1
    all_reduce: Callable[[Collective, Tensor], Tensor | PartialSum] = unsummed

    def share(self, total: int) -> slice:
        """This rank's contiguous part of ``total`` rows or columns."""
        part = total // self.size
        return slice(self.rank * part, (self.rank + 1) * part)

    def check(self, config: ModelConfig) -> None:
        """:class:`ConfigError` if the model cannot be split over ``size`` ranks."""
        for field, multiple in (("o_groups", 1), ("num_attention_heads", 1), ("moe_intermediate_size", 16)):
            value = getattr(config, field)
            if value % (self.size * multiple):
                raise ConfigError(
                    f"--tp-size {self.size}: {field} is {value}, expected a multiple of {self.size * multiple};"
                    " use a smaller --tp-size"
                )
