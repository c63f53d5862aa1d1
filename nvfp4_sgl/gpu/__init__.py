"""The decoder on a GPU: the same model as :mod:`nvfp4_sgl.model`, composed at the boundaries of the fused kernels.

Everything that is not a matrix product is a kernel of :mod:`nvfp4_sgl.triton_kernels`; products are
:mod:`nvfp4_sgl.gpu.products`. Activations are bf16, accumulators and everything that the specification keeps in fp32
are fp32, cache rows are SGLang's packed entries. A pass waits for nothing on the host, and the shapes of a decode pass
follow from the batch size alone, so that it can be captured in a CUDA graph.
"""
