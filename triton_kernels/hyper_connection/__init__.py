"""Manifold-constrained hyper-connections (mHC) and the residual streams they mix (DEEPSEEK_V4.md §2)."""
