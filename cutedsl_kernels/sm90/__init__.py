"""NVFP4 products on Hopper: weights expanded to bf16 on their way to the tensor core, activations in bf16."""
