"""CuTeDSL kernels: NVFP4 and MXFP8 GEMMs on tensor cores, by architecture. Installed as ``nvfp4_sgl.cutedsl_kernels``.

Operands and results are torch tensors. Nothing in this folder knows SGLang or the model: of ``nvfp4_sgl`` it imports
``errors`` and ``formats`` alone.

For SM100 and SM103 (B200, GB200, B300), from ``w4a4.operations``::

    weights = Weights.dense(codes, block_scales, global_scale)        # once; uint8 [F, K/2], E4M3 [F, K/16], fp32
    tile = token_tile_for(tokens)                                     # decides the layout of the rows' block scales
    rows = Rows(row_codes, row_block_scales, row_scale, tile)         # as the activation quantiser writes them
    product(rows, weights, out=out)                                   # bf16 or fp32 [T, F]

    hidden = expert_gate_up_quantized(expert_rows, gate_up, limit)    # rows sorted by expert; SwiGLU; NVFP4 again
    expert_down(hidden, down, row_weight, out=out)                    # times the routing weights

``grouped_product`` is the block-diagonal GEMM of the attention output. A shared expert alone takes the expert
operations with plain ``Rows``. FP8 matrices are multiplied by ``mxfp8.operations``, of ``MxFp8Rows`` and
``MxFp8Weights``, with the same kernels. All are PyTorch operators (``torch.ops.nvfp4_sgl``) that ``torch.compile``
traces and CUDA graphs capture. They are checked before each launch and allocate nothing when ``out`` is given.

Modules
    w4a4/, mxfp8/: NVFP4 and FP8 matrices on SM100. w4a16/, w8a16/: the same on Hopper. Of each: ``operations``,
    ``operand`` (their weights), ``custom_ops`` (their PyTorch operators). ``nvfp4_sgl.formats.rows`` and
    ``scale_layout``: activations, and the layout of block scales that activation quantisers must write.
    warm_up, library: run every kernel before the first request; compile them ahead of time.
    launcher: where calls run; tests put an emulator there. occupancy: how many clusters a GPU runs at a time.
    errors: the errors of compiling, finding and launching kernels.
    plan, compiled, workspace: from a call to a launch of the right kernel.
    sm100/, sm90/: the kernels of an architecture; common/: what they share.
"""

if __name__ != "nvfp4_sgl.cutedsl_kernels":
    raise ModuleNotFoundError(
        f"{__name__}: expected nvfp4_sgl.cutedsl_kernels, the only name of this folder; import that", name=__name__
    )
