"""Manifold-constrained hyper-connections (mHC) and the residual streams they mix (specification §2)."""
