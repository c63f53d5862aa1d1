"""Triton kernels of the DeepSeek-V4 decoder, one op family a file. Empty as yet.

What will live here: activation quantisation, RoPE and inverse RoPE, Sinkhorn hyper-connections, the KV compressors,
top-k metadata and sparse attention, for SM100 and Hopper. Torch tensors go in and come out; nothing in this folder
knows SGLang or the model, and nothing imports upwards.

The folder is installed as ``nvfp4_sgl.triton_kernels``: the top-level name ``triton_kernels`` belongs to a third-party
package that SGLang probes for.
"""
