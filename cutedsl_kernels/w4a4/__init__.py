"""GEMMs of NVFP4 weights with NVFP4 activations (w4a4): operand, operations, PyTorch operators. Kernels for SM100."""
