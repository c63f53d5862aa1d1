"""The mixture of experts apart from its GEMMs: routing, permutation, SwiGLU, the final sum (specification §6)."""
