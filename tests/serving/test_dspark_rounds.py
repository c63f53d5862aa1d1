"""DSpark's guesses in SGLang's rounds against NumPy; mistakes that raise no error are seen."""

from __future__ import annotations

import runpy
from typing import Any

import pytest

from tests.support import dspark_rig
from tests.support.mutation import mutated

BOUND = 2e-5
"""fp32 against fp64, by the largest value."""


def test_rounds() -> None:
    """A prompt in chunks, then rounds that accept one row, some and all."""
    assert dspark_rig.worst() < BOUND


MISTAKES = {
    "streams in front of a layer": (
        "model.capture",
        "columns = dict(zip(layers,",
        "columns = dict(zip([layer - 1 for layer in layers],",
    ),
    "one stream instead of the mean": (
        "targets.reference.drafts",
        "means.copy_(stream_mean(streams))",
        "means.copy_(streams[:, 0])",
    ),
    "a block one position early": ("serving.drafts.dspark_backend", "lengths + block", "lengths + block - 1"),
    "a block planned as rows of a verify pass": (
        "serving.drafts.dspark_backend",
        "PassKind.BLOCK",
        "PassKind.VERIFY",
    ),
    "no context of a round": (
        "serving.model",
        "draft.inject(captured_means(walk, self.captured, draft.parts.capture), plan, caches)",
        "means = captured_means(walk, self.captured, draft.parts.capture)\n"
        "        if len(means) > 6:\n"
        "            draft.inject(means, plan, caches)",
    ),
    "the bias of another token": ("ops.drafts", "markov_bias(before, w1, w2)", "markov_bias(0 * before, w1, w2)"),
    "no bias": ("ops.drafts", "logits + markov_bias(before, w1, w2)", "logits + 0 * markov_bias(before, w1, w2)"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistake_is_seen(name: str) -> None:
    with mutated(*MISTAKES[name]):
        rig: dict[str, Any] = runpy.run_path(dspark_rig.__file__)
        assert not rig["worst"]() < 100 * BOUND
