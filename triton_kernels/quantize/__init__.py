"""Activations to NVFP4: the recipe as device functions, rows as kernels store them, and the ops that only quantise."""
