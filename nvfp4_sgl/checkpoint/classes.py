"""Classes of matrices by their role in a layer, for reports and for the choice of what to convert."""

from __future__ import annotations

import enum
import re

_BLOCK = re.compile(r"^(layers|mtp)\.(\d+)\.(.+)$")


class MatrixClass(enum.Enum):
    """The role of a matrix of the decoder or of a draft's block; ``value`` is its name for people."""

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
    """``wq_b`` of the indexer, ``wkv`` and ``wgate`` of its compressor; its head weights are never quantised."""

    @classmethod
    def of(cls, stem: str) -> MatrixClass:
        """Class of the matrix ``stem``, by DeepSeek's original name (``layers.3.attn.wq_b``).

        Raises:
            ValueError: no such matrix is in a decoder layer.
        """
        inner = _BLOCK.sub(r"\3", stem)
        for kind, modules in MODULES.items():
            if any(inner.startswith(m[:-1]) if m.endswith("*") else inner == m for m in modules):
                return kind
        raise ValueError(f"'{stem}' is no matrix of a decoder layer")


MODULES: dict[MatrixClass, tuple[str, ...]] = {
    MatrixClass.EXPERTS: ("ffn.experts.*",),
    MatrixClass.SHARED: ("ffn.shared_experts.*",),
    MatrixClass.Q: ("attn.wq_a", "attn.wq_b"),
    MatrixClass.KV: ("attn.wkv",),
    MatrixClass.O_A: ("attn.wo_a",),
    MatrixClass.O_B: ("attn.wo_b",),
    MatrixClass.COMPRESSOR: ("attn.compressor.*",),
    MatrixClass.INDEXER: ("attn.indexer.*",),
}
"""Names in a layer, by DeepSeek's original names; ``*`` at the end stands for whatever is inside."""


def layer_of(stem: str) -> int:
    """Number of the layer that the matrix ``stem`` belongs to."""
    found = _BLOCK.match(stem)
    assert found is not None and found[1] == "layers", stem
    return int(found[2])
