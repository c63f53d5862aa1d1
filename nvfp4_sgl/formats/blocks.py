"""Elements that share a scale, by format. Imports no torch: headers are checked by these numbers alone."""

NVFP4_BLOCK = 16
"""Columns of a row. Source: specification §9.1."""
MXFP4_BLOCK = 32
"""Columns of a row. Source: specification §8.1."""
FP8_BLOCK = 128
"""Rows, and as many columns. Source: specification §8.1."""
