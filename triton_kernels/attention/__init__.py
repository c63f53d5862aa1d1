"""Sparse attention over the window and the selected compressed entries: the op, its kernel, its tilings."""
