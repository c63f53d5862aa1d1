"""Sources of weights, and names of the parts that are read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from nvfp4_sgl.checkpoint.decoders import Matrix, MatrixRange
from nvfp4_sgl.checkpoint.storage import Storage

if TYPE_CHECKING:
    from torch import Tensor, nn

    from nvfp4_sgl.formats.mxfp8 import MxFp8Tensor


@dataclass(frozen=True)
class Shard:
    """One checkpoint matrix inside a merged one, or the part of it that this rank holds."""

    stem: str
    rows: slice | None = None
    cols: slice | None = None


class WeightSource(Protocol):
    """The reader that a model asks, :class:`nvfp4_sgl.checkpoint.reader.CheckpointReader`, whose docstrings apply."""

    def storage(self, stem: str) -> Storage: ...

    def expect(self, matrices: Sequence[MatrixRange]) -> None: ...

    def read(self, name: str, rows: slice | None = None, cols: slice | None = None) -> Tensor: ...

    def read_matrix(self, stem: str, rows: slice | None = None, cols: slice | None = None) -> Matrix: ...

    def read_mxfp8(self, stem: str, rows: slice | None = None, cols: slice | None = None) -> MxFp8Tensor: ...


def frozen(tensor: Tensor) -> nn.Parameter:
    """``tensor`` as a parameter that is never trained."""
    from torch import nn

    return nn.Parameter(tensor, requires_grad=False)
