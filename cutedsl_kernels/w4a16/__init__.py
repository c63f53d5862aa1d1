"""GEMMs of NVFP4 weights with bf16 activations (w4a16): operand, operations, PyTorch operators. Kernels for Hopper."""
