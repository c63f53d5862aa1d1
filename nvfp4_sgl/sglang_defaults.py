"""Defaults of a server: SGLang's for DeepSeek-V4 on a GPU, which may be absent, and ours on a CPU."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from nvfp4_sgl.errors import ConfigError

REQUESTS, CHUNK = 256, 8192
"""``--max-running-requests`` and ``--chunked-prefill-size``."""
FRACTION = 0.85
"""A ``--mem-fraction-static`` like those that it chooses."""
DRAFT_STEPS = 3
"""``--speculative-num-steps`` of an MTP draft."""
PACKED_SWA_RATIO = 0.1
"""``--swa-full-tokens-ratio``."""
SAMPLERS = ("flashinfer", "pytorch")
"""Values of ``--sampling-backend`` on NVIDIA's GPUs. SGLang has them, but to import it moves the caches of kernels."""

CPU_DEFAULTS: dict[str, Any] = {
    "dtype": "float32",
    "max_total_tokens": 16384,
    "max_running_requests": 16,
    "chunked_prefill_size": 1024,
    "mem_fraction_static": 0.3,
    "sleep_on_idle": True,
}
"""Defaults of our architecture on a CPU; a flag that the user gave wins.

float32 because the CPU path is the reference; small pools because rows are exact (2 KiB a token and layer);
``sleep_on_idle`` because an idle scheduler would otherwise keep a core busy.
"""

CPU_SWA_RATIO = 0.5
"""Window rows for each token of capacity. SGLang's 0.1 suits pools of millions of tokens. A request holds up to two
256-token window pages, so the 16 requests and 16384 tokens of :data:`CPU_DEFAULTS` need one half."""


def triton_cache() -> Path:
    """The folder of Triton's kernels in a server with this environment: SGLang moves it below its own cache.

    Raises:
        ConfigError: ``TRITON_CACHE_DIR`` is empty.
    """
    given = os.environ.get("TRITON_CACHE_DIR")
    if given == "":  # Triton takes it for a folder
        raise ConfigError("TRITON_CACHE_DIR: expected a folder, found an empty value; name one, or unset it")
    if given is not None:
        return Path(given)
    base = os.environ.get("SGLANG_CACHE_DIR", "~/.cache/sglang")
    # Path.expanduser fails for a user who does not exist.
    return Path(os.path.expanduser(base)) / "triton"  # noqa: PTH111
