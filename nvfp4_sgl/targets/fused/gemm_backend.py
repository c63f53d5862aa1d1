"""Protocols of the GEMM backends in ``gemm_*.py``. Needs no torch.

A backend loads GEMMs; a loaded GEMM holds its weights and multiplies. What is composed of them, once for all targets,
is in :mod:`.projections` and :mod:`.experts`; which backends a target has, in :mod:`.backends`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from nvfp4_sgl.targets.target import Descriptor
from nvfp4_sgl.weights.gemms import OperandKind
from nvfp4_sgl.weights.layout import ExpertMatrices
from nvfp4_sgl.weights.source import Shard

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from nvfp4_sgl.model.contract import Activation, Context, Form
    from nvfp4_sgl.triton_kernels.experts.permutation import Routes


class Gemm(Protocol):
    """A GEMM of merged matrices [F, K], or a block-diagonal one [G, F, K].

    Attributes:
        takes: what it reads.
        sizes: rows of each of its matrices.
    """

    @property
    def takes(self) -> Form: ...

    @property
    def sizes(self) -> Sequence[int]: ...

    def __call__(self, x: Activation, dtype: torch.dtype, features: int | None = None) -> Tensor:
        """[T, F] from [T, K], or [T, G, F] from [T, G, K], in ``dtype``: bf16 or fp32.

        Args:
            features: of merged matrices, the first so many rows alone: [T, features]. A backend that cannot multiply a
                part multiplies all, and gives a slice.
        """


@runtime_checkable
class SendingGemm(Protocol):
    """A GEMM that can store its result in several tensors at once."""

    def send(self, x: Activation, places: Sequence[Tensor]) -> Tensor:
        """The result, stored in all of ``places``, bf16 [T, F] each; returns the first."""


class GatedGemm(Protocol):
    """The GEMM of gate and up of one expert, and SwiGLU."""

    def __call__(self, x: Tensor, limit: float) -> Tensor:
        """bf16 [T, I] from bf16 [T, d], clamped at ``limit``."""


class ExpertGemms(Protocol):
    """The GEMMs of experts, with SwiGLU between them.

    Attributes:
        groups: that rows are sorted into.
    """

    @property
    def groups(self) -> int: ...

    def token_tile(self, rows: int) -> int:
        """The tile of rows for ``rows`` rows in all: each group begins at a multiple of it."""

    def __call__(self, x: Tensor, routes: Routes) -> Tensor:
        """bf16 [R, d], what each row's expert makes of it, in the order of ``routes``, from bf16 [T, d]."""


class GemmBackend(Protocol):
    """A backend of GEMMs."""

    def load(self, context: Context, shards: Sequence[Shard], groups: int | None = None) -> Gemm:
        """The GEMM of ``shards``, merged; with ``groups`` the block-diagonal one of a single shard.

        Raises:
            CheckpointError: a matrix cannot be read or multiplied so; names it.
        """


class GatedBackend(GemmBackend, Protocol):
    """A backend that can run a shared expert by itself."""

    def load_gated(self, context: Context, shards: Sequence[Shard]) -> GatedGemm:
        """The GEMM of gate and up; errors as in :meth:`load`."""


class ExpertsBackend(Protocol):
    """A backend with grouped GEMMs of experts."""

    def load_experts(self, context: Context, matrices: Sequence[ExpertMatrices]) -> ExpertGemms:
        """The GEMMs of experts, a group each, in their order; errors as in :meth:`GemmBackend.load`."""


@dataclass(frozen=True)
class Backends:
    """The backends of a target, by the kind of a GEMM's operands.

    Attributes:
        dense: GEMMs of all tokens. shared: those of a shared expert that runs by itself.
        experts: those of experts.
        token_tile: by tokens, the tile of rows that activations are quantised for.
        expert_token_tile: by rows and groups, that of experts' GEMMs.
    """

    target: Descriptor
    dense: Mapping[OperandKind, GemmBackend]
    shared: Mapping[OperandKind, GatedBackend]
    experts: Mapping[OperandKind, ExpertsBackend]
    expert_token_tile: Callable[[int, int], int]
    token_tile: Callable[[int], int] = lambda tokens: 1

    def __str__(self) -> str:
        return self.target.name

    def kinds(self, context: Context, shards: Sequence[Shard]) -> list[OperandKind]:
        """The kinds of the matrices, each as if it were not merged with others."""
        return [self.target.kind_of(context.source.storage(shard.stem)) for shard in shards]
