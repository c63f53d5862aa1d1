"""Penalties of every row of a round: by the answer, and the guesses up to the row.

SGLang takes the same penalties for all rows of a round, and of a round's tokens counts the last alone. Here a request
that asks for a penalty has a tensor of counts of its answer on the device, which each round adds what it has accepted
to. The host knows an answer only when a round's results are there, which under the overlap schedule is a round late;
nothing waits for it. Requests without penalties cost nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nvfp4_sgl.serving.sglang import scheduling

_ANSWER = "nvfp4_sgl_answer"
"""Attribute of SGLang's request: its :class:`Answer`."""


@dataclass
class Answer:
    """The tokens that a request with penalties has said.

    Attributes:
        retractions: how often it had been retracted when this was made; its answer is in the prompt afterwards.
        counts: fp32 [vocabulary], of each token behind the prompt whose keys are cached: all but the last one.
        penalties: fp32 [3], frequency, presence and repetition.
    """

    retractions: int
    counts: Tensor
    penalties: Tensor


def is_penalised(request: Any) -> bool:
    """Whether tokens that SGLang's ``request`` has said become less likely."""
    params = request.sampling_params
    return bool(params.frequency_penalty or params.presence_penalty or params.repetition_penalty != 1)


class Penalties:
    """Those of one round, applied by :meth:`apply`, and remembered for the next by :meth:`remember`."""

    def __init__(self, guesses: Tensor, lengths: Tensor, requests: Sequence[Any]):
        """Arguments:
        guesses: int [B, n], the token of each row; the first is decided.
        lengths: int [B], tokens of each request whose keys were cached before the round.
        requests: SGLang's, B of them.
        """
        self._guesses, self._lengths, self._requests = guesses, lengths, requests
        self._asking = [place for place, request in enumerate(requests) if is_penalised(request)]
        self._counts: Tensor | None = None

    def apply(self, logits: Tensor) -> None:
        """Apply penalties and ``min_new_tokens`` to ``logits``, fp32 [B, n, vocabulary], in place."""
        if self._asking:
            self._penalise(logits)
        for place, request in enumerate(self._requests):
            least = request.sampling_params.min_new_tokens
            if len(request.output_ids) < least:
                self._hold_back(logits[place], place, least)

    def remember(self, accepted: Tensor) -> None:
        """Count the tokens of ``accepted`` rows, int [B], for the next round; the last one comes as its first guess."""
        if self._counts is not None:
            rows = self._of_asking(accepted).long() - 1
            now = self._counts[torch.arange(len(rows), device=rows.device), rows]
            for place, counts in zip(self._asking, now, strict=True):
                getattr(self._requests[place], _ANSWER).counts = counts

    def _of_asking(self, tensor: Tensor) -> Tensor:
        return torch.stack([tensor[place] for place in self._asking])

    def _penalise(self, logits: Tensor) -> None:
        tokens, picked = self._of_asking(self._guesses).clamp(min=0).long(), self._of_asking(logits)
        answers = [self._answer(place, logits.shape[-1]) for place in self._asking]
        requests, rows = tokens.shape
        before = torch.stack([answer.counts for answer in answers])
        counts = before[:, None].repeat(1, rows, 1)
        up_to = torch.ones(rows, rows, device=logits.device).tril().expand(requests, -1, -1)
        counts.scatter_add_(2, tokens[:, None].expand(-1, rows, -1), up_to)
        penalties = torch.stack([answer.penalties for answer in answers])[:, :, None, None]
        frequency, presence, repetition = penalties.unbind(1)
        said = counts > 0
        picked -= frequency * counts + presence * said
        scale = torch.where(said, repetition, 1.0)
        picked = torch.where(picked < 0, picked * scale, picked / scale)
        for place, of_request in zip(self._asking, picked, strict=True):
            logits[place] = of_request
        self._counts = counts

    def _answer(self, place: int, vocabulary: int) -> Answer:
        """The answer of the request at ``place``: made in its first round, and again in the first after a retraction.

        In that round the host may or may not know the token that the prompt's pass has given, which is a guess here:
        the length says which tokens come before it.
        """
        request, device = self._requests[place], self._guesses.device
        found: Answer | None = getattr(request, _ANSWER, None)
        if found is None or found.retractions != request.retraction_count:
            params, said = request.sampling_params, request.output_ids
            ids = _on(device, said, torch.int64).clamp(min=0)
            cached = torch.arange(len(said), device=device) < self._cached(place)
            counts = torch.zeros(vocabulary, device=device).scatter_add_(0, ids, cached.float())
            values = [params.frequency_penalty, params.presence_penalty, params.repetition_penalty]
            found = Answer(request.retraction_count, counts, _on(device, values, torch.float32))
            setattr(request, _ANSWER, found)
        return found

    def _cached(self, place: int) -> Tensor:
        """Tokens of the answer whose keys were cached before the round, int []."""
        return self._lengths[place] - len(self._requests[place].origin_input_ids)

    def _hold_back(self, of_request: Tensor, place: int, least: int) -> None:
        """Allow no row of [n, vocabulary] to end an answer of fewer tokens than ``least``."""
        ends = _on(of_request.device, scheduling.ending_tokens(self._requests[place]), torch.int64)
        said = self._cached(place) + 1 + torch.arange(len(of_request), device=of_request.device)
        of_request[:, ends] = of_request[:, ends].masked_fill((said < least)[:, None], -torch.inf)


def _on(device: torch.device, values: Sequence[float], dtype: torch.dtype) -> Tensor:
    """``values`` on the device, without waiting for it."""
    return torch.tensor(values, dtype=dtype).to(device, non_blocking=True)
