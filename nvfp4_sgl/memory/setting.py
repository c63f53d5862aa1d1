"""The settings of a server that its memory depends on."""

from __future__ import annotations

from dataclasses import dataclass

from nvfp4_sgl.cache.layout import DRAFTED_STATE_RING, STATE_RING, Rings
from nvfp4_sgl.checkpoint.drafts import DraftKind
from nvfp4_sgl.weights.parallel import Ownership


@dataclass(frozen=True)
class Setting:
    """The settings of a server.

    Attributes:
        ranks: ``--tp-size``.
        requests, context, chunk: ``--max-running-requests``, ``--context-length``, ``--chunked-prefill-size``.
        dtype_bytes: of an element of the model dtype.
        row_bytes: of an element of exact cache rows; ``None`` for packed entries.
        swa_ratio: ``--swa-full-tokens-ratio``.
        fraction: ``--mem-fraction-static``: what weights and pools may take of the memory that is free at first.
        most_tokens: ``--max-total-tokens``; ``None`` for as many as fit.
        window_by_ratio: whether ``swa_ratio`` says how large the window pool is. Without that flag SGLang sizes it by
            ``--max-running-requests`` if that is given, and finds room for chunks itself.
        draft: the kind of the draft that is served beside the model, if one is.
        round_tokens: ``--speculative-num-draft-tokens``, tokens of a verify pass; 0 without a draft.
        prompt_tokens: of the largest prompt pass that is captured; 0 if none is.
        pushed_tokens: of the largest pass whose parts of sums ranks push to each other; 0 if they push none.
    """

    ranks: int
    requests: int
    context: int
    chunk: int
    dtype_bytes: int
    row_bytes: int | None
    swa_ratio: float
    fraction: float
    most_tokens: int | None = None
    window_by_ratio: bool = True
    draft: DraftKind | None = None
    round_tokens: int = 0
    prompt_tokens: int = 0
    pushed_tokens: int = 0

    @property
    def rings(self) -> Rings:
        """Rows of the compressors' state rings."""
        return STATE_RING if self.draft is None else DRAFTED_STATE_RING

    @property
    def owner(self) -> Ownership:
        """The share of the weights that a rank holds."""
        return Ownership(size=self.ranks)
