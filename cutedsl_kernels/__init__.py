"""CuTeDSL kernels: NVFP4 tensor-core GEMMs and the fused SwiGLU, one kernel a file, by architecture. Empty as yet.

What will live here: block-scaled NVFP4 x NVFP4 GEMMs for SM100 (tcgen05), NVFP4-weight GEMMs for Hopper (wgmma), their
schedulers, epilogues and layouts. Torch tensors go in and come out; nothing in this folder knows SGLang or the model,
and nothing imports upwards.

The folder is installed as ``nvfp4_sgl.cutedsl_kernels``.
"""
