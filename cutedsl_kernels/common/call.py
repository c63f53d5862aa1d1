"""The tensors of one launch, as a compiled kernel of any architecture takes them; operators have checked them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from torch import Tensor

from .arguments import ADDRESSES, Arguments
from .clusters import Clusters
from .shape import GemmShape

ONES = "ones"
"""The operand of rooms whose weights have no global scales, and whose tokens no row scales."""


@dataclass(frozen=True, kw_only=True)
class GemmCall(ABC):
    """The tensors and sizes of one launch.

    Attributes:
        shape: the kernel's.
        weights: [groups, ...], in the layout of the architecture.
        tokens: [rows, ...] or [rows, groups, ...], the last dimension contiguous.
        out: [rows, outputs] or [rows, groups, outputs].
        alpha: fp32, the weights' global scales.
        offsets, counts: int32 [groups] of a grouped kernel, else None: each expert's first row, a multiple of the token
            tile, and its rows.
        row_weight: fp32 [rows] that results are multiplied by; None on Hopper.
        sizes: those of the launch, of a call that :class:`BoundCall` made; else they are told when asked for.

    Raises:
        ValueError: a CTA of the cluster would have nothing to add up.
    """

    shape: GemmShape
    weights: Tensor
    tokens: Tensor
    out: Tensor
    alpha: Tensor
    offsets: Tensor | None = None
    counts: Tensor | None = None
    row_weight: Tensor | None = None
    sizes: tuple[int, ...] | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        stages = -(-self.k // self.stage_k)
        if self.shape.split_k > stages:
            raise ValueError(f"split_k {self.shape.split_k}: K = {self.k} has only {stages} stages")

    @property
    @abstractmethod
    def stage_k(self) -> int:
        """Elements of K in a pipeline stage."""

    @property
    @abstractmethod
    def features(self) -> int:
        """Weight rows."""

    @property
    def outputs(self) -> int:
        """Output features."""
        return self.features // self.shape.rows_per_feature

    @property
    @abstractmethod
    def k(self) -> int:
        """Elements of K."""

    @property
    @abstractmethod
    def blocks(self) -> int:
        """Number of blocks of tiles in all groups, an upper bound for a grouped kernel; a cluster takes one at a
        time."""

    @property
    def rows(self) -> int:
        return self.tokens.shape[0]

    @property
    def groups(self) -> int:
        return self.weights.shape[0]

    @property
    def out_strides(self) -> tuple[int, int]:
        """Elements between rows of ``out``, and between its groups."""
        return self.out.stride(0), self.out.stride(1) if self.out.dim() == 3 else 0

    @property
    def token_strides(self) -> tuple[int, int]:
        """Elements of ``tokens`` between its rows, and between its groups."""
        return self.tokens.stride(0), self.tokens.stride(1) if self.tokens.dim() == 3 else 0

    @property
    def alpha_strides(self) -> tuple[int, int]:
        """Elements of ``alpha`` between features (between gate and up, if gated), and between groups."""
        if self.shape.gated:
            return 1, 2
        if self.shape.grouped and self.alpha.numel() == self.groups:
            return 0, 1
        return self.alpha.stride(-1), self.alpha.stride(0)

    def clusters(self, active: Clusters) -> int:
        """Persistent clusters to launch on a GPU that runs so many at a time: at most one a block."""
        return max(1, min(self.blocks, active.of(self.shape.cluster) * self.shape.ctas_per_sm))

    def with_workspace(self, active: Clusters) -> Self:
        """The call with the workspace that its kernel needs, on a GPU that runs so many clusters at a time."""
        return self

    def copied(self) -> dict[str, Tensor]:
        """Tensors that TMA reads and writes, by the operators' names; they must be aligned to 16 bytes."""
        return {"weights": self.weights, "tokens": self.tokens, "out": self.out}

    @abstractmethod
    def tensors(self) -> tuple[list[Tensor], list[Tensor]]:
        """(read, written) by the kernel."""

    def measure(self, clusters: int) -> Arguments:
        """The sizes and strides of a launch on ``clusters`` persistent clusters; 0 for addresses and those of scales.

        Architectures whose operands have block scales add those.
        """
        token_row, token_group = self.token_strides
        out_row, out_group = self.out_strides
        alpha_feature, alpha_group = self.alpha_strides
        return Arguments(**dict.fromkeys(Arguments._fields, 0))._replace(
            features=self.features,
            k=self.k,
            rows=self.rows,
            groups=self.groups,
            clusters=clusters,
            token_row=token_row,
            token_group=token_group,
            out_row=out_row,
            out_group=out_group,
            alpha_feature=alpha_feature,
            alpha_group=alpha_group,
        )

    def arguments(self, clusters: int) -> Arguments:
        """The compiled kernel's arguments, for a launch on ``clusters`` persistent clusters."""
        tensors = vars(self)
        addresses = [0 if (tensor := tensors.get(name)) is None else tensor.data_ptr() for name in ADDRESSES]
        return Arguments._make((*addresses, *(self.sizes or self.measure(clusters).sizes)))


class BoundCall:
    """A call without its operands, to be made again for other operands that look the same (``formats.checks.once``).

    Shapes, strides and dtypes of operands decide all else of a call, so that it is planned, checked and measured once.

    Args:
        call: of operands that have been checked.
        clusters: of its launches.
        operands: what it was made of, by the names of the call's tensors. Scales that it has not are views of the
            operand ``ones``.

    Raises:
        ValueError: a tensor of the call, other than the workspace, is neither that operand nor a view of it from its
            first element; or a list of tensors is not that operand.
    """

    def __init__(self, call: GemmCall, clusters: int, operands: Mapping[str, object]) -> None:
        self._kind = type(call)
        self._kept: dict[str, Any] = {}
        self._operands: list[tuple[str, str]] = []
        self._views: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = []
        for name, value in vars(call).items():
            if isinstance(value, (list, tuple)) and any(isinstance(item, Tensor) for item in value):
                if value is not operands.get(name):
                    raise ValueError(f"{name}: expected the operand {name}")
                self._operands.append((name, name))
                continue
            if not isinstance(value, Tensor) or name == "workspace":
                self._kept[name] = value
                continue
            source = name if name in operands else ONES
            given = operands.get(source)
            if not isinstance(given, Tensor) or (given.data_ptr(), given.dtype) != (value.data_ptr(), value.dtype):
                raise ValueError(f"{name}: expected the operand {source}, or a view of it from its first element")
            self._operands.append((name, source))
            if (given.shape, given.stride()) != (value.shape, value.stride()):
                self._views.append((name, tuple(value.shape), value.stride()))
        self._kept["sizes"] = call.measure(clusters).sizes

    def of(self, operands: Mapping[str, Any]) -> GemmCall:
        """The call of operands that look like those that it was bound with."""
        call = object.__new__(self._kind)
        fields = vars(call)
        fields.update(self._kept)
        for name, source in self._operands:
            fields[name] = operands[source]
        for name, shape, strides in self._views:
            fields[name] = fields[name].as_strided(shape, strides)
        return call
