"""GEMMs of FP8 weights with MXFP8 activations: operand, operations, PyTorch operators. Kernels for SM100."""
