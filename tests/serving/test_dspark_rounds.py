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
        "means, entered = [], 0",
        "means, entered, layers = [], 0, [layer - 1 for layer in layers]",
    ),
    "one stream instead of the mean": (
        "model.capture",
        "stream_means([streams]).to(streams.dtype)",
        "streams[:, 0].clone()",
    ),
    "a chunk one position late": (
        "serving.drafts.dspark_context",
        "batch.seq_lens,\n        PassKind.EXTEND",
        "batch.seq_lens + 1,\n        PassKind.EXTEND",
    ),
    "a block one position early": ("serving.drafts.dspark_backend", "lengths + block", "lengths + block - 1"),
    "a block planned as rows of a verify pass": (
        "serving.drafts.dspark_backend",
        "PassKind.BLOCK,\n        torch.full_like(lengths, block, dtype=torch.int32),",
        "PassKind.VERIFY,\n        tokens_each=block,",
    ),
    "nothing committed": (
        "serving.drafts.dspark_context",
        "    _inject(executor.kv_injector, logits_output.hidden_states, request)\n",
        "    del request, logits_output\n",
    ),
    "a round committed one position early": (
        "serving.drafts.dspark_context",
        "batch.seq_lens + rows",
        "batch.seq_lens + rows - 1",
    ),
    "the bias of another token": ("serving.drafts.dspark_model", "previous.clamp(min=0)", "previous.clamp(min=0) * 0"),
    "no bias": (
        "serving.drafts.dspark_model",
        "self.draft.bias(previous.clamp(min=0)), None",
        "0 * self.draft.bias(previous.clamp(min=0)), None",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistake_is_seen(name: str) -> None:
    with mutated(*MISTAKES[name]):
        rig: dict[str, Any] = runpy.run_path(dspark_rig.__file__)
        assert not rig["worst"]() < 100 * BOUND
