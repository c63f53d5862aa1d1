"""Every operation of the model: its contract and its plain torch reference.

A module holds one family. The public functions' docstrings are the contracts; :mod:`nvfp4_sgl.ops.dispatch`
decides which implementation of each runs on a target.
"""
