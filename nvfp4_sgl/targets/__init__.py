"""Targets: implementations of the boundaries of :mod:`nvfp4_sgl.model.contract`, and the choice among them.

``choose`` is the one place that decides; what it returns is what runs, and what ``doctor``, the log and
``/server_info`` print. ``reference`` composes the references of :mod:`nvfp4_sgl.ops` for the CPU; ``fused`` runs the
kernels of Hopper and SM100, which differ in their GEMMs alone.
"""
