"""The tokens and requests of a forward pass, as every kernel that reads or writes a cache takes them.

The scheduler's tables of slots are not here: :func:`.resolve.resolve` has copied from them what a pass needs, so that
the scheduler may change them while the layers run. Pages hold 256 tokens, whose full slots are contiguous, so that a
request's ``pages`` give the full slot of each of its positions. An entry of ratio r has slot ``full // r``
(specification §4.3). A ratio-4 state row lies in the ring of its window page (``swa // 256 * ring + swa % ring``), a
ratio-128 state row in the ring of its request (``request * ring + position % ring``). Rings have 8 and 128 rows, or 16
and 256 where tokens are drafted.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nvfp4_sgl.formats.checks import (
    once,
    require_contiguous,
    require_dimensions,
    require_dtype,
    require_rows,
    require_same_device,
    require_shape,
)

from ..common.integers import next_power_of_2

PAGE_TOKENS = 256
"""Tokens of one logical page."""
WARP = 32
"""Threads of a warp."""


def padded_requests(requests: int) -> int:
    """The number of requests that a kernel is compiled for if a program takes all of them: 1, 32, or a power of two.

    A warp adds 32 values, or finds the largest, in one instruction, but 2 to 16 by exchanges between lanes. So one
    variant serves 2 to 32 requests.
    """
    return 1 if requests == 1 else max(next_power_of_2(requests), WARP)


@dataclass(frozen=True)
class Batch:
    """T tokens of B requests, ordered by request.

    Request b adds tokens ``bounds[b] .. bounds[b + 1] - 1``. The first of them has position ``starts[b]``, and all
    earlier positions are cached. A request may add no tokens. Padding of a captured graph is a request of slot 0 with
    one token at position 0: SGLang keeps request slot 0, and page 0 of every pool, for that.

    Attributes:
        positions: int64 [T], absolute.
        owners: int32 [T], the request (0 to B - 1) of each token.
        starts: int32 [B], the position of each request's first new token.
        bounds: int32 [B + 1], each request's first token, and T.
        requests: int64 [B], SGLang's slot of each request, which has the request's ratio-128 state ring.
        pages: int32 [B, columns], rows contiguous: the first full slot of each page of a request, those that this pass
            begins included; columns beyond them, and rows of requests that add no token, are undefined.
        window_slots: int32 [T, window], contiguous: the slots of each token's window, its own first, -1 before position
            0. Compression at ratio 4 needs windows of 8 or more.
        tokens_each: tokens that each request adds, where the pass's kind says so: 1 in decode, in passes that verify a
            draft its tokens and one more. ``None`` where requests add any number.
    """

    positions: Tensor
    owners: Tensor
    starts: Tensor
    bounds: Tensor
    requests: Tensor
    pages: Tensor
    window_slots: Tensor
    tokens_each: int | None

    @property
    def tokens(self) -> int:
        """T."""
        return self.positions.shape[0]

    @property
    def is_decode(self) -> bool:
        """Whether the pass decodes: each request adds one token, so T is B."""
        return self.tokens_each == 1

    @once
    def check(self, op: str) -> None:
        """Refuse what the kernels cannot read; from metadata alone.

        Raises:
            OperandTypeError: a dtype is not one of those above.
            OperandValueError: a shape, stride or device does not fit.
        """
        require_dimensions(f"{op}: positions", self.positions, 1, "[tokens]")
        require_dimensions(f"{op}: requests", self.requests, 1, "[requests]")
        tokens, requests = self.tokens, self.requests.shape[0]
        if self.tokens_each is not None:
            each = f"{self.tokens_each} tokens of each request"
            require_shape(f"{op}: positions", self.positions, (requests * self.tokens_each,), each)
        require_shape(f"{op}: owners", self.owners, (tokens,), "[tokens]")
        require_shape(f"{op}: starts", self.starts, (requests,), "[requests]")
        require_shape(f"{op}: bounds", self.bounds, (requests + 1,), "[requests + 1]")
        require_dimensions(f"{op}: pages", self.pages, 2, "[requests, columns]")
        require_shape(f"{op}: pages", self.pages, (requests, self.pages.shape[1]), "[requests, columns]")
        require_rows(f"{op}: pages", self.pages)
        require_dimensions(f"{op}: window_slots", self.window_slots, 2, "[tokens, window]")
        require_shape(
            f"{op}: window_slots", self.window_slots, (tokens, self.window_slots.shape[1]), "[tokens, window]"
        )
        for name in ("positions", "requests"):
            require_dtype(f"{op}: {name}", getattr(self, name), torch.int64)
        for name in ("owners", "starts", "bounds", "pages", "window_slots"):
            require_dtype(f"{op}: {name}", getattr(self, name), torch.int32)
        for name in ("positions", "owners", "starts", "bounds", "requests", "window_slots"):
            require_contiguous(f"{op}: {name}", getattr(self, name))
            require_same_device("pages", self.pages, **{f"{op}: {name}": getattr(self, name)})
