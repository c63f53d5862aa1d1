"""Quantisation of activations: recipes as device functions, stored rows, ops that only quantise or round to values."""
