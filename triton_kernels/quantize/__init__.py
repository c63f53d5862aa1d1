"""Quantisation of activations to NVFP4: the recipe as device functions, the stored rows, and ops that only quantise."""
