"""The tokens and requests of a forward pass, as every kernel that reads or writes a cache takes them.

Nothing is resolved to slots here. A request's row of ``slots`` gives the full slot of each of its positions, and
everything else follows by arithmetic (specification §4.3). Pages hold 256 tokens. An entry of ratio r has slot
``full // r``, and a window row the slot that ``full_to_swa`` gives. A ratio-4 state row lies in the ring of its window
page (``swa // 256 * 8 + swa % 8``), a ratio-128 state row in the ring of its request
(``request * 128 + position % 128``).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nvfp4_sgl.formats.checks import (
    require_contiguous,
    require_dimensions,
    require_dtype,
    require_rows,
    require_same_device,
    require_shape,
)

PAGE_TOKENS = 256
"""Tokens of one logical page."""


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
        requests: int64 [B], the request's row of ``slots``, and the owner of its ratio-128 state ring.
        slots: int32 [request slots, columns], rows contiguous: the full slot of each position of a request, those of
            this pass included.
        full_to_swa: int64 [full slots], the window slot of each full slot.
    """

    positions: Tensor
    owners: Tensor
    starts: Tensor
    bounds: Tensor
    requests: Tensor
    slots: Tensor
    full_to_swa: Tensor

    @property
    def tokens(self) -> int:
        """T."""
        return self.positions.shape[0]

    @property
    def is_decode(self) -> bool:
        """Whether every request adds exactly one token, as far as sizes tell; always so in a captured graph."""
        return self.positions.shape[0] == self.requests.shape[0]

    def check(self, op: str) -> None:
        """Refuse what the kernels cannot read; from metadata alone.

        Raises:
            OperandTypeError: a dtype is not one of those above.
            OperandValueError: a shape, stride or device does not fit.
        """
        require_dimensions(f"{op}: positions", self.positions, 1, "[tokens]")
        require_dimensions(f"{op}: requests", self.requests, 1, "[requests]")
        tokens, requests = self.tokens, self.requests.shape[0]
        require_shape(f"{op}: owners", self.owners, (tokens,), "[tokens]")
        require_shape(f"{op}: starts", self.starts, (requests,), "[requests]")
        require_shape(f"{op}: bounds", self.bounds, (requests + 1,), "[requests + 1]")
        require_dimensions(f"{op}: slots", self.slots, 2, "[request slots, columns]")
        require_rows(f"{op}: slots", self.slots)
        for name in ("positions", "requests", "full_to_swa"):
            require_dtype(f"{op}: {name}", getattr(self, name), torch.int64)
        for name in ("owners", "starts", "bounds", "slots"):
            require_dtype(f"{op}: {name}", getattr(self, name), torch.int32)
        for name in ("positions", "owners", "starts", "bounds", "requests", "full_to_swa"):
            require_contiguous(f"{op}: {name}", getattr(self, name))
            require_same_device("slots", self.slots, **{f"{op}: {name}": getattr(self, name)})
