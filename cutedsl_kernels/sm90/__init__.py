"""NVFP4 and FP8 GEMMs on Hopper: weights are expanded to bf16 in registers, activations are bf16."""
