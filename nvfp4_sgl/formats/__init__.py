"""The exact number formats DeepSeek-V4 meets on this stack: definitions first, in plain torch.

Every module states the bytes of one format and the rounding of every step into it. Kernels are compared with
these functions bit for bit; nothing here knows of a model, a checkpoint or a server.

``e2m1`` and ``e4m3`` and ``ue8m0`` are the element formats; ``nvfp4``, ``mxfp4``, ``mxfp8`` and ``fp8_block`` the
block formats of matrices and activations; ``scale_layout`` the tensor core's order of block scales; ``kv_entry`` and
``index_entry`` the rows of the key caches.
"""
