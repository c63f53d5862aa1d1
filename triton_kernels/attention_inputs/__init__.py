"""The output of an attention layer's first GEMM: store its latents and window keys, compress tokens into entries."""
