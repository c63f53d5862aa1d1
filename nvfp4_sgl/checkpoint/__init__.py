"""Checkpoints in DeepSeek's original layout: required tensors, contents of the files, readers.

``names`` says what a configuration demands, ``inventory`` compares that with the files' headers before a byte of
data is read, ``reader`` hands out the tensors bit for bit and checks their values. What is told of a checkpoint is in
:mod:`nvfp4_sgl.reports`; checkpoints that nobody trained are in :mod:`nvfp4_sgl.synthetic`.
"""
