"""The mixture of experts apart from its GEMMs: routing, permutation, SwiGLU, the final sum (DEEPSEEK_V4.md §6)."""
