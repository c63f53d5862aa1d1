"""Prompt passes of a fixed shape: what a CUDA graph can hold, and which of the shapes a pass takes.

A pass of fewer tokens is padded. The tokens that are missing are those of one more request, at positions 0, 1, 2, …
of the request slot that SGLang keeps for padding: all of its positions are slot 0 of every pool. They see their own
rows alone, visit no expert and write nothing but page 0. Requests that are missing add no token.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nvfp4_sgl.config import LayerKind, ModelConfig
from nvfp4_sgl.model.contract import PassKind, PassRequest


@dataclass(frozen=True)
class PromptSize:
    """The shape of a prompt pass.

    Attributes:
        tokens, requests: of the pass, the padding's included.
        longest: tokens of the longest sequence.
    """

    tokens: int
    requests: int
    longest: int

    def holds(self, tokens: int, requests: int, longest: int) -> bool:
        """Whether a pass of so many tokens and requests fits, the padding's request included if there is padding."""
        padding = int(tokens < self.tokens)
        return tokens <= self.tokens and requests + padding <= self.requests and longest <= self.longest

    @property
    def cost(self) -> tuple[int, int]:
        """The order in which shapes are preferred: few tokens first, then short sequences."""
        return self.tokens, self.longest


def shapes(
    tokens: Sequence[int], requests: int, *, longest: int, columns: int, unscored: int | None = None
) -> list[PromptSize]:
    """The shapes to capture, the largest first: the others then find room in its memory.

    Two for each number of tokens where the model's index may choose: for sequences so short that each query attends to
    every entry, which scores none, and for all others.

    Args:
        tokens: numbers of tokens; those that ``columns`` or ``longest`` is too small for are left out.
        requests: of each shape.
        longest: tokens of the longest sequence that may come.
        columns: positions of a row of the table of slots, which padding counts up to.
        unscored: tokens of the longest sequence of which no entry is scored; ``None`` if all or none are, whatever it
            is.
    """
    lengths = {longest if unscored is None else min(longest, unscored), longest}
    fitting = [count for count in tokens if count <= min(longest, columns)]
    found = (PromptSize(count, requests, length) for count in fitting for length in lengths)
    return sorted(found, key=lambda shape: shape.cost, reverse=True)


def unscored_length(config: ModelConfig) -> int | None:
    """Tokens of the longest sequence whose every ratio-4 entry is attended to; ``None`` without a choice to make.

    The room for scores has whole pages of 64 entries, and a pass scores where that is more than the index chooses.
    """
    pages = config.index_topk // 64
    return 4 * 64 * pages + 3 if pages and LayerKind.CSA in config.layer_kinds else None


def choose(among: Iterable[PromptSize], tokens: int, requests: int, longest: int) -> PromptSize | None:
    """The shape of a pass of so many tokens and requests, whose longest sequence has ``longest`` tokens after it.

    The least that holds it; ``None`` if none does.
    """
    fitting = [shape for shape in among if shape.holds(tokens, requests, longest)]
    return min(fitting, key=lambda shape: shape.cost, default=None)


class StaticPrompt:
    """The tensors of prompt passes of one shape, whose contents change from pass to pass.

    Attributes:
        shape: of the pass.
        ids: int64 [tokens].
        request: the pass as planners take it; its tensors are this object's.
        used: tokens of the pass that was loaded last, which come first.
    """

    def __init__(self, shape: PromptSize, device: torch.device | str, padding_request: int = 0):
        """All padding at first; ``padding_request`` is the request slot of padding."""
        self.shape, self._padding_request, self.used = shape, padding_request, 0
        self._count = torch.arange(shape.tokens, device=device)
        self.ids = torch.zeros(shape.tokens, dtype=torch.int64, device=device)
        # A tensor each, and int32 as in SGLang's batches: Triton compiles apart for other alignments and types.
        requests, ends = (torch.zeros(shape.requests, dtype=torch.int64, device=device) for _ in range(2))
        added = torch.zeros(shape.requests, dtype=torch.int32, device=device)
        self.request = PassRequest(self._count.clone(), requests, ends, PassKind.EXTEND, added, longest=shape.longest)
        self._pad(0, 0)

    def load(self, request: PassRequest) -> None:
        """Take over where the tokens of ``request`` stand, and pad the rest; on the device."""
        tokens, count, own = request.positions.shape[0], request.requests.shape[0], self.request
        assert request.kind is PassKind.EXTEND and request.added is not None and own.added is not None
        assert request.longest is not None and self.shape.holds(tokens, count, request.longest), self.shape
        own.positions[:tokens].copy_(request.positions)
        for buffer, values in (
            (own.requests, request.requests),
            (own.ends, request.ends),
            (own.added, request.added),
        ):
            buffer[:count].copy_(values)
        self._pad(tokens, count)

    def load_ids(self, ids: Tensor) -> None:
        """Take over the token ids, int [T], of the pass that was loaded; those of padding are 0."""
        assert len(ids) == self.used, f"expected the ids of {self.used} tokens, found {len(ids)}"
        self.ids[: self.used].copy_(ids)
        self.ids[self.used :].zero_()

    def _pad(self, tokens: int, count: int) -> None:
        """Fill what is behind the first ``tokens`` tokens and ``count`` requests."""
        own, left = self.request, self.shape.tokens - tokens
        assert own.added is not None
        self.used = tokens
        own.positions[tokens:].copy_(self._count[:left])
        own.requests[count:].fill_(self._padding_request)
        for buffer in (own.ends, own.added):
            buffer[count:].zero_()
            if left:
                buffer[count : count + 1].fill_(left)
