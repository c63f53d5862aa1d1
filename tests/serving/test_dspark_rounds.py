"""DSpark's guesses in SGLang's rounds against NumPy; mistakes that raise no error are seen."""

from __future__ import annotations

import runpy
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support import dspark_rig
from tests.support.draft_rig import RAW
from tests.support.mutation import mutated

BOUND = 2e-5
"""fp32 against fp64, by the largest value."""


def test_rounds() -> None:
    """A prompt in chunks, then rounds that accept one row, some and all."""
    assert dspark_rig.worst() < BOUND


def test_sglang_reads_the_same_fields() -> None:
    """Its worker makes blocks of its own reading of config.json, and passes the layers to capture on."""
    from sglang.srt.speculative.dspark_components.dspark_config import parse_dspark_draft_config

    theirs, ours = parse_dspark_draft_config(draft_hf_config=SimpleNamespace(**RAW)), dspark_rig.DSPARK
    assert (theirs.mask_token_id, theirs.gamma, theirs.markov_rank) == (ours.noise_token, ours.block, ours.markov_rank)
    assert theirs.target_layer_ids == [*ours.captured_layers]
    assert len({ours.noise_token, ours.block, ours.markov_rank}) == 3, "fields that are alike would hide a mistake"


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
    "another noise token": (
        "draft_config",
        'integer("dspark_noise_token_id", 0, config.vocab_size - 1)',
        'integer("dspark_noise_token_id", 0, config.vocab_size - 1) + 1',
    ),
    "the bias of another token": ("ops.drafts", "markov_bias(before, w1, w2)", "markov_bias(0 * before, w1, w2)"),
    "no bias": ("ops.drafts", "logits + markov_bias(before, w1, w2)", "logits + 0 * markov_bias(before, w1, w2)"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistake_is_seen(name: str) -> None:
    with mutated(*MISTAKES[name]):
        rig: dict[str, Any] = runpy.run_path(dspark_rig.__file__)
        assert not rig["worst"]() < 100 * BOUND
