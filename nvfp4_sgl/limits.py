"""Sizes that kernels take and values that sampling takes, also for checks before weights are read. Imports nothing.

Headers are inspected without torch, which every kernel imports. A name says what it bounds; unlike things with an equal
bound have a name each.
"""

from __future__ import annotations

# Experts.
MAX_CONFIGURED_EXPERTS = 4096
"""Experts of a layer in config.json; bounds what is built before files are looked at. Pro has 384."""
MAX_ROUTED_EXPERTS = 512
"""Experts that a token is routed among, columns of logits: a warp holds all of a token's."""
MAX_GEMM_EXPERTS = 512
"""Matrices of a GEMM over experts, whose kernel keeps a table of them in shared memory; part of the kernels' code."""
MAX_STACKED_EXPERTS = MAX_GEMM_EXPERTS - 1
"""Routed experts of a GEMM in which the shared one is a matrix more."""

# GEMMs.
NVFP4_K_MULTIPLE = 64
"""K of NVFP4 operands: 32 bytes of codes, and whole groups of four block scales."""
MXFP8_K_MULTIPLE = 32
"""K of MXFP8 operands: whole blocks, 32 bytes of codes."""
TILED_K_MULTIPLE = 64
"""K of Hopper's tiled weights: half of a tile, the second half of which is zeros where K ends in its middle."""
GEMM_K_MULTIPLE = max(NVFP4_K_MULTIPLE, MXFP8_K_MULTIPLE, TILED_K_MULTIPLE)
"""K of a model's quantised GEMMs, the same for all storages."""
FEATURE_MULTIPLE, GATED_FEATURE_MULTIPLE = 8, 64
"""Weight rows of a model's quantised GEMMs: bf16 results are stored in 16 bytes; SwiGLU's are the next K."""

# SwiGLU.
MIN_SWIGLU_LIMIT, MAX_SWIGLU_LIMIT = 2.0**-10, 2.0**60
"""The clamp, ``swiglu_limit``."""
MIN_QUANTIZED_SWIGLU_LIMIT = 0.27846454276107376
"""The clamp where results are quantised to NVFP4, -min silu(x), at x ≈ -1.27846: below, limit² would not bound them."""

# Attention.
HEAD_DIM, ROPE_DIM = 512, 64
"""Values of a head and of a cache entry, and those of them that are rotated."""
MAX_NORM_WIDTH = 16384
"""Values of a row that is normalised, latents of queries among them: a program holds one whole row in registers."""
MAX_QUERY_EPS = 1.0
"""Epsilon that is added to the mean square of a query."""
MIN_CSA_WINDOW = 8
"""Window of a model with CSA layers: their kernel finds the state of so many tokens by the window's slots."""

# Indexer.
INDEX_HEAD_DIM, MAX_INDEX_HEADS = 128, 64
"""Values of an index key, and heads of an index query."""
MAX_INDEX_TOPK = 2048
"""Entries that a query selects."""
CHUNK_SCORES = 16384
"""Scores that a program holds; a longer row is divided into chunks of so many."""
MAX_CANDIDATES = 16384
"""Candidates of a row, of all of its chunks together."""
MAX_SCORES_AT_ONCE = 1 << 26
"""Most fp32 index scores held at once (256 MiB), unless one query alone has more: a prompt is scored in parts."""

# Hyper-connections.
STREAMS, MAX_HIDDEN_SIZE = 4, 16384
"""Residual streams of a site, exactly so many, and values of each: a program holds a collapsed row in registers."""
MIN_HC_EPS, MAX_HC_EPS = 1e-9, 1.0
"""``hc_eps`` of a site: fp32 holds four divisors of Sinkhorn multiplied (``hyper_connection/sinkhorn.py``)."""

# Tensor-parallel ranks.
PUSHING_RANKS = (2, 4, 8)
"""Ranks whose kernels store parts of sums in one another's memory: a program adds a power of two of parts."""

# Sampling.
MAX_TEMPERATURE = 1e30
"""Bound on temperatures. One that is infinite in fp32 makes NaN of -inf, the logit of a token that a grammar forbids.
SGLang's sampler then ends the scheduler."""
MIN_REPETITION_PENALTY = 1e-20
"""Bound on repetition penalties. A logit may hold the frequency penalty of a million equal tokens, 2e6. Divided by this
and by the lowest temperature that is not greedy (1e-6), it is 2e32, still an fp32 number."""
