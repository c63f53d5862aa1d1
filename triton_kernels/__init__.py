"""Triton kernels of the DeepSeek-V4 decoder, for SM100 and Hopper: everything that is not a GEMM with NVFP4 weights.

Torch tensors go in and come out; nothing in this folder knows SGLang or the model, and nothing imports upwards. Where
outputs are given nothing is allocated, no grid depends on a tensor's data, and nothing waits for the device: every op
can be captured in a CUDA graph. A folder holds one family of ops:

    attention, attention_inputs, indexer: the three stages of an attention layer around its GEMMs.
    hyper_connection: the residual streams and the mHC sites between sublayers.
    experts: routing, permutation, SwiGLU, the sum of a token's experts.
    logits: greedy tokens, a draft's guesses, and which of them are right.
    quantize: activations to NVFP4, alone and as device functions that other kernels call.
    entries: rows of the key caches. plan: slots of a pass. common: what all of them share.

The folder is imported as ``nvfp4_sgl.triton_kernels`` and under no other name: a second copy of a module would have
exceptions and registrations of its own. The top-level name ``triton_kernels`` belongs to a third-party package that
SGLang imports for other architectures. Where the top of a checkout comes first on ``sys.path``, as in its own folder,
that name leads here, and this file imports the third-party package from further down the path; where there is none,
:class:`ModuleNotFoundError`, as without this folder.
"""

if __name__ != "nvfp4_sgl.triton_kernels":
    import importlib.util
    import sys
    from importlib.machinery import PathFinder
    from pathlib import Path

    _top = Path(__file__).resolve().parents[1]
    _spec = PathFinder.find_spec(__name__, [entry for entry in sys.path if Path(entry).resolve() != _top])
    if __name__ != "triton_kernels" or _spec is None or _spec.loader is None:
        raise ModuleNotFoundError(
            f"{__name__}: expected nvfp4_sgl.triton_kernels, the only name of this folder; import that", name=__name__
        )
    sys.modules[__name__] = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(sys.modules[__name__])
