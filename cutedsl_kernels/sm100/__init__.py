"""Kernels for SM100 (B200, GB200) and SM103: tcgen05 block-scaled tensor cores."""
