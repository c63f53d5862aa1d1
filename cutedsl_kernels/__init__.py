"""CuTeDSL kernels: NVFP4 products on tensor cores, by architecture. Torch tensors go in and come out; nothing in this
folder knows SGLang or the model, and nothing imports upwards. Installed as ``nvfp4_sgl.cutedsl_kernels``.

For SM100 and SM103 (B200, GB200, B300), from ``operations``::

    weights = Weights.dense(codes, block_scales, global_scale)        # once; uint8 [F, K/2], E4M3 [F, K/16], fp32
    tile = token_tile_for(tokens)                                     # decides how the rows' block scales lie
    rows = Rows(row_codes, row_block_scales, row_scale, tile)         # written so by the activation quantiser
    product(rows, weights, out=out)                                   # bf16 or fp32 [T, F]

    hidden = expert_gate_up_quantized(expert_rows, gate_up, limit)    # rows sorted by expert; SwiGLU; NVFP4 again
    expert_down(hidden, down, row_weight, out=out)                    # times the routing weights

``grouped_product`` is the attention output's block-diagonal product; a shared expert is the expert operations on plain
``Rows``. All are PyTorch operators (``torch.ops.nvfp4_sgl``) that ``torch.compile`` traces and CUDA graphs capture:
checked before each launch, nothing allocated when ``out`` is given.

Modules
    operations, operand: what to call, and with what. scale_layout (in sm100/): what activation quantisers must write.
    warm_up, library, build: run every kernel before the first request; compile them ahead of time.
    launcher: where calls run; tests put an emulator there. errors: what is raised on purpose.
    custom_ops, checks, plan, compiled: from a call to a checked launch of the right kernel.
    sm100/: the kernels.
"""

if __name__ != "nvfp4_sgl.cutedsl_kernels":
    raise ImportError(f"{__name__}: expected nvfp4_sgl.cutedsl_kernels, the only name of this folder; import that")
