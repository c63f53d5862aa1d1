"""Classes of matrices by what they do in a layer: what reports are grouped by."""

from __future__ import annotations

import enum
import re

_LAYER = re.compile(r"^layers\.(\d+)\.(.+)$")


class MatrixClass(enum.Enum):
    """What a matrix of the decoder does; ``value`` is its name for people."""

    EXPERTS = "experts"
    """Gate, up and down of routed experts."""
    SHARED = "shared"
    """Those of shared experts."""
    Q = "q"
    """``wq_a`` and ``wq_b``."""
    KV = "kv"
    O_A = "o_a"
    O_B = "o_b"
    COMPRESSOR = "compressor"
    """``wkv`` and ``wgate`` of the attention's compressor."""
    INDEXER = "indexer"
    """``wq_b`` of the indexer, and its compressor."""

    @classmethod
    def of(cls, stem: str) -> MatrixClass:
        """Class of the matrix ``stem``, by DeepSeek's original name (``layers.3.attn.wq_b``)."""
        inner = _LAYER.sub(r"\2", stem)
        return next(found for prefix, found in _PREFIXES.items() if inner.startswith(prefix))


_PREFIXES = {
    "ffn.experts.": MatrixClass.EXPERTS,
    "ffn.shared_experts.": MatrixClass.SHARED,
    "attn.wq_": MatrixClass.Q,
    "attn.wkv": MatrixClass.KV,
    "attn.wo_a": MatrixClass.O_A,
    "attn.wo_b": MatrixClass.O_B,
    "attn.compressor.": MatrixClass.COMPRESSOR,
    "attn.indexer.": MatrixClass.INDEXER,
}


def layer_of(stem: str) -> int:
    """Number of the layer that the matrix ``stem`` belongs to."""
    found = _LAYER.match(stem)
    assert found is not None, stem
    return int(found[1])
