"""Random tensors by name, with no file: a weight source for parts of a model that no tiny checkpoint has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from nvfp4_sgl.checkpoint.decoders import MatrixRange
from nvfp4_sgl.checkpoint.names import TensorSpec
from nvfp4_sgl.checkpoint.storage import Storage
from nvfp4_sgl.formats.mxfp8 import MxFp8Tensor
from nvfp4_sgl.synthetic.tiny_weights import draw


class DrawnSource:
    """Every tensor of ``specs`` as :func:`draw` gives it, matrices in bf16."""

    def __init__(self, specs: Mapping[str, TensorSpec], seed: int, experts: int):
        self.tensors = {spec.key: draw(spec, seed, experts=experts) for spec in specs.values()}

    def storage(self, stem: str) -> Storage:
        return Storage.PLAIN

    def expect(self, matrices: Sequence[MatrixRange]) -> None:
        """Nothing: there are no files."""

    def read(self, name: str, rows: slice | None = None, cols: slice | None = None) -> Tensor:
        found = self.tensors[name]
        found = found if rows is None else found[rows]
        return found if cols is None else found[:, cols]

    def read_matrix(self, stem: str, rows: slice | None = None, cols: slice | None = None) -> Tensor:
        return self.read(f"{stem}.weight", rows, cols)

    def read_mxfp8(self, stem: str, rows: slice | None = None, cols: slice | None = None) -> MxFp8Tensor:
        raise NotImplementedError(f"{stem}: all matrices are bf16")
