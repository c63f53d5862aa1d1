"""A worked example of an op: contract and reference in ``reference``, Triton kernel in ``kernel``.

``docs/own_kernel.md`` goes through it; ``tests/triton/test_own_kernel.py`` checks it.
"""
