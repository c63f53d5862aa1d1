"""Triton kernels of the DeepSeek-V4 decoder, for SM100 and Hopper: everything that is not a matrix product.

Torch tensors go in and come out; nothing in this folder knows SGLang or the model, and nothing imports upwards. Where
outputs are given nothing is allocated, no grid depends on a tensor's data, and nothing waits for the device: every op
can be captured in a CUDA graph. A module holds one family of ops, its device functions first. Shared by all:

    rounding: fp32 to the narrow formats, bit for bit as ``nvfp4_sgl.numerics`` defines them.
    nvfp4: the device function that quantises a row and stores it where the products look for it.
    rope: the table of angles of a pass, which every kernel that rotates reads.
    batch: where the tokens of a pass stand; metadata resolves it to slots once for all layers.
    checks: arguments, from their metadata alone.

The folder is installed as ``nvfp4_sgl.triton_kernels``: the top-level name ``triton_kernels`` belongs to a third-party
package that SGLang probes for.
"""
