"""Everything of the mixture of experts that is not a GEMM: routing, permutation, SwiGLU, the final sum."""
