"""Classes of large matrices, by which a conversion is chosen."""

from __future__ import annotations

import enum


class MatrixClass(enum.Enum):
    """What a matrix does in a layer; ``value`` is its name on the command line."""

    EXPERTS = "experts"
    """Routed experts: gate, up and down."""
    SHARED = "shared"
    """The shared expert."""
    Q = "q"
    """wq_a and wq_b."""
    KV = "kv"
    """wkv."""
    O_A = "o_a"
    O_B = "o_b"
    COMPRESSOR = "compressor"
    """wkv and wgate of a layer's compressor."""
    INDEXER = "indexer"
    """wq_b of the indexer, wkv and wgate of its compressor; its head weights are never quantised."""


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


def class_of(stem: str) -> MatrixClass:
    """The class of the matrix ``layers.N.<name>``; ValueError for what is no matrix of a decoder layer."""
    inner = stem.split(".", 2)[-1]
    for kind, modules in MODULES.items():
        if any(inner.startswith(m[:-1]) if m.endswith("*") else inner == m for m in modules):
            return kind
    raise ValueError(f"'{stem}' is no matrix of a decoder layer")
