"""Flags and environment of a server with a GPU's decoder and backend, whose kernels are interpreted on the CPU.

A token costs a second and more, so checkpoints have a layer of each kind and prompts end far from a page.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

PATCHES = Path(__file__).parent / "interpreted_gpu"
LARGEST_PREFILL, REQUESTS = 256, 3
FLAGS = (
    *("--dtype", "bfloat16", "--kv-cache-dtype", "fp8_e4m3", "--skip-server-warmup"),
    *("--max-total-tokens", "2048", "--max-running-requests", str(REQUESTS), "--context-length", "1024"),
    *("--chunked-prefill-size", str(LARGEST_PREFILL)),
)
SHAPES: dict[str, Any] = {"num_hidden_layers": 3, "n_routed_experts": 6, "index_topk": 512}
"""A layer of each kind, and nothing to choose: a rounding that flips an expert or entry would hide mistakes."""


def environment(target: str) -> dict[str, str]:
    """Variables of such a server for ``target``."""
    return {
        "PYTHONPATH": str(PATCHES),
        "TRITON_INTERPRET": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "INTERPRETED_TARGET": target,
        "OMP_NUM_THREADS": "1",
    }
