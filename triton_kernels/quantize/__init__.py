"""Activations to NVFP4: the device functions, and the ops that only quantise."""
