"""From a checkpoint's tensors to what a rank holds: which matrices are merged, which part of each is this rank's.

``parallel`` says how a model is split, ``layout`` which matrices of a layer are one GEMM, ``source`` reads, ``matrix``
holds what was read, bit for bit. How a target multiplies with it is the target's business.
"""
