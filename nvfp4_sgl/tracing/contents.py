"""The contents of a record of passes. Imports no torch, so that records are compared at once."""

FORMAT = 2
SKETCH = 16
"""Random projections of a boundary's values: the difference of two runs is known within about 1/sqrt(2 · 16) = 18 %."""
SAMPLED_VALUES = 2**22
"""Values of which digest and sketch are made; of larger outputs evenly spaced rows."""
RANK_LOCAL = ("attn.project_q", "attn.project_q.q", "attn.attend", "attn.wo_a", "attn.wo_b", "ffn.experts")
"""Boundaries of a layer whose values are a rank's own: its heads, its o-groups, and its parts of sums over ranks.

Everything else is the same on every rank of any number (:class:`~nvfp4_sgl.weights.parallel.TensorParallel`):
``tests/model/test_trace.py`` holds this list against two ranks that run.
"""
