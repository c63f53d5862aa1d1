"""Random prompts whose discrete choices are no coin tosses.

Index top-k and expert top-k are discontinuous: where two candidates differ by less than fp32 noise, two correct
implementations may choose differently, and log-probabilities then differ by a lot. Tests that compare to 1e-4 draw
prompts for which the oracle's own margins are larger than that noise.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import DeepseekV4ForCausalLM

FIRST_TEXT_ID = 25
"""Below are special tokens."""

FP32_MARGIN = 4e-6
"""Relative. transformers in fp32 and in fp64 differ by less than that in the scores that are compared here."""


def draw_ids(length: int, seed: int, vocab: int) -> list[int]:
    """``length`` random ids of ordinary tokens."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(FIRST_TEXT_ID, vocab, (length,), generator=generator).tolist()


def clear_ids(
    model: DeepseekV4ForCausalLM, length: int, seed: int, *, margin: float = FP32_MARGIN, attempts: int = 40
) -> list[int]:
    """The first draw from ``seed`` on whose selection margin, alone and from position 0, is at least ``margin``.

    Found once for each model.
    """
    found = CLEAR.setdefault(model, {})
    key = (length, seed, margin)
    if key not in found:
        found[key] = _first_clear(model, length, seed, margin, attempts)
    return list(found[key])


CLEAR: WeakKeyDictionary[DeepseekV4ForCausalLM, dict[tuple[int, int, float], list[int]]] = WeakKeyDictionary()
"""By model, what was drawn."""


def _first_clear(model: DeepseekV4ForCausalLM, length: int, seed: int, margin: float, attempts: int) -> list[int]:
    for attempt in range(attempts):
        ids = draw_ids(length, 1000 * seed + attempt, model.config.vocab_size)
        if selection_margin(model, ids, enough=margin) >= margin:
            return ids
    raise AssertionError(f"no prompt of {length} tokens from seed {seed} has a margin of {margin}")


@torch.no_grad()
def selection_margin(model: DeepseekV4ForCausalLM, ids: list[int], enough: float = 0.0) -> float:
    """Smallest gap between the last chosen and the first refused candidate, over every top-k in the forward pass.

    Relative to the largest score of the row (index) or to 1 (router scores, which are of that order). The pass ends at
    the first top-k with a gap below ``enough``, and that gap is returned.
    """
    gaps = Gaps(enough)
    handles = []
    for module in model.modules():
        kind = type(module).__name__
        if kind == "DeepseekV4IndexerScorer":
            handles.append(module.register_forward_hook(_index_hook(gaps, model.config.index_topk)))
        elif kind == "DeepseekV4TopKRouter":
            handles.append(module.register_forward_hook(_router_hook(gaps)))
    try:
        with contextlib.suppress(TooSmall):
            model(torch.tensor(ids)[None], use_cache=False, logits_to_keep=1)
    finally:
        for handle in handles:
            handle.remove()
    return gaps.smallest


class TooSmall(Exception):
    """Ends a pass that need not go on."""


class Gaps:
    """The smallest gap so far of this thread's pass; :class:`TooSmall` once it is below ``enough``.

    Tests run passes of one model in several threads.
    """

    def __init__(self, enough: float):
        self._enough, self.smallest, self._thread = enough, float("inf"), threading.get_ident()

    def add(self, gaps: Tensor) -> None:
        if threading.get_ident() != self._thread:
            return
        if gaps.numel():
            self.smallest = min(self.smallest, float(gaps.min()))
        if self.smallest < self._enough:
            raise TooSmall


def _index_hook(gaps: Gaps, topk: int) -> Callable[[nn.Module, tuple, Tensor], None]:
    def hook(module: nn.Module, inputs: tuple, scores: Tensor) -> None:
        entries = torch.arange(scores.shape[-1])
        visible = (torch.arange(scores.shape[1]) + 1) // 4
        rows = visible > topk
        if not rows.any():
            return
        masked = scores[0].masked_fill(entries >= visible[:, None], float("-inf"))[rows]
        best = masked.topk(topk + 1, dim=-1).values
        gaps.add((best[:, topk - 1] - best[:, topk]) / best.abs().amax(dim=-1))

    return hook


def _router_hook(gaps: Gaps) -> Callable[[nn.Module, tuple, tuple], None]:
    def hook(module: nn.Module, inputs: tuple, outputs: tuple) -> None:
        scores = module.score_fn(outputs[0]) + module.e_score_correction_bias
        best = scores.topk(module.top_k + 1, dim=-1).values
        gaps.add(best[:, -2] - best[:, -1])

    return hook
