"""GEMMs of FP8 weights with bf16 activations (w8a16): operand, operations, PyTorch operators. Kernels for Hopper."""
