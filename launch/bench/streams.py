"""Embedding to streams and RMSNorm, at the shapes of Flash and Pro."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F

from nvfp4_sgl.triton_kernels import streams

from . import Case

WIDTHS = {"flash": 4096, "pro": 7168}
TOKENS = (1, 8, 64, 256, 8192)
STREAMS = 4


def cases() -> Iterator[Case]:
    for model, width in WIDTHS.items():
        for tokens in TOKENS:
            x = torch.randn(tokens, width, device="cuda", dtype=torch.bfloat16)
            weight, out = torch.randn_like(x[0]), torch.empty_like(x)
            copied = x.new_empty(tokens, STREAMS, width)
            yield Case(
                f"expand_streams/{model}/{tokens}x{width}",
                partial(streams.expand_streams, x, STREAMS, out=copied),
                bytes=x.nbytes + copied.nbytes,
                peers={"torch": partial(copied.copy_, x.unsqueeze(1).expand_as(copied))},
            )
            yield Case(
                f"rms_norm/{model}/{tokens}x{width}",
                partial(streams.rms_norm, x, weight, 1e-6, out=out),
                bytes=2 * x.nbytes,
                peers={"torch": partial(F.rms_norm, x, x.shape[-1:], weight, 1e-6)},
            )
