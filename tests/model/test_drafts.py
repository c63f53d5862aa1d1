"""The drafts' references against NumPy in fp64; mistakes that raise no error are seen."""

from __future__ import annotations

import re
import runpy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from nvfp4_sgl.checkpoint.names import dspark_specs, mtp_specs
from nvfp4_sgl.draft_config import DsparkConfig
from nvfp4_sgl.errors import ConfigError, UnsupportedError
from nvfp4_sgl.model.dspark import DsparkDraft
from nvfp4_sgl.model.mtp import MtpDraft
from nvfp4_sgl.ops.drafts import confidence, markov_bias
from nvfp4_sgl.targets import reference
from tests.support import draft_rig
from tests.support.draft_rig import CONFIG, DSPARK, RAW, STAGES, TOKENS, Rig
from tests.support.mutation import mutated
from tests.support.numpy_draft import sigmoid

BOUND = 2e-5
"""fp32 against fp64, by the largest value."""
PASSES: Sequence[Sequence[int]] = [(TOKENS,), (17, TOKENS), (1, 2, 3, 30, TOKENS)]


@pytest.mark.parametrize("cuts", PASSES)
def test_mtp(cuts: Sequence[int]) -> None:
    """In one pass or several: keys of earlier passes are in the cache."""
    assert draft_rig.mtp_error(cuts) < BOUND


@pytest.mark.parametrize("cuts", [(3,), (9, 16, 17, TOKENS), *PASSES])
def test_dspark(cuts: Sequence[int]) -> None:
    """Contexts shorter and longer than the window, injected at once and in parts."""
    assert draft_rig.dspark_error(cuts) < BOUND


def test_a_block_leaves_nothing_behind_that_a_later_one_sees() -> None:
    """Its own keys lie where accepted tokens are injected: a second block is as if the first had never been."""
    rig, other = (Rig(dspark_specs(CONFIG, DSPARK)) for _ in range(2))
    draft_rig.dspark(rig, (TOKENS - 3,))
    draft, seen = DsparkDraft(rig.context, DSPARK), draft_rig.captured(TOKENS)
    for start, end in ((0, TOKENS - 3), (TOKENS - 3, TOKENS)):
        draft.inject(draft.means([streams[start:end] for streams in seen]), rig.step(start, end), rig.caches.layers)
    found = draft_rig.block(rig, draft, TOKENS)
    torch.testing.assert_close(found, draft_rig.dspark(other, (TOKENS,)), rtol=1e-5, atol=1e-5)


def test_heads_of_dspark() -> None:
    rig = Rig(dspark_specs(CONFIG, DSPARK))
    last, array = f"mtp.{STAGES - 1}", rig.numpy
    w1, w2 = (rig.source.tensors[f"{last}.markov_head.markov_{name}.weight"] for name in ("w1", "w2"))
    previous = torch.tensor([0, 5, CONFIG.vocab_size - 1])
    bias = array[f"{last}.markov_head.markov_w1.weight"][previous] @ array[f"{last}.markov_head.markov_w2.weight"].T
    assert draft_rig.error(markov_bias(previous, w1, w2), bias) < 1e-6
    projection = rig.source.tensors[f"{last}.confidence_head.proj.weight"]
    x = draft_rig.drawn(3, CONFIG.hidden_size, seed=8)
    read = np.concatenate([x.double().numpy(), array[f"{last}.markov_head.markov_w1.weight"][previous]], axis=1)
    expected = sigmoid(read @ array[f"{last}.confidence_head.proj.weight"].T)[:, 0]
    assert draft_rig.error(confidence(x, previous, w1, projection), expected) < 1e-6
    assert draft_rig.wrong_tokens() == 0


MISTAKES = {
    "one stream instead of their mean": ("ops.drafts", "streams.float().mean(1)", "streams.float()[:, 0]"),
    "a block that sees only what is before": (
        "cache.plan",
        "batch.ends[owner, None] - 1 - torch.arange",
        "positions[:, None] - torch.arange",
    ),
    "a window one short": (
        "cache.plan",
        "seen >= batch.starts[owner, None] - window",
        "seen > batch.starts[owner, None] - window",
    ),
    "nothing injected into the last stage": (
        "model.dspark",
        "for attention, cache in zip(layers, caches, strict=True):",
        "for attention, cache in zip(layers[:-1], caches):",
    ),
    "the context not normalised": (
        "targets.reference.drafts",
        "Activation(rms_norm(projected, self.main_norm, self._eps, out_dtype=self._dtype))",
        "Activation(projected.to(self._dtype))",
    ),
    "the tokens' bias by the anchor alone": ("ops.drafts", "markov_bias(before", "markov_bias(anchor"),
    "w1 and w2 taken for each other": (
        "ops.drafts",
        "w1[previous].float() @ w2.float().t()",
        "w2[previous].float() @ w1.float().t()",
    ),
    "MTP's norms taken for each other": (
        "targets.reference.drafts",
        'for name in ("enorm", "hnorm")',
        'for name in ("hnorm", "enorm")',
    ),
    "MTP's matrices taken for each other": (
        "targets.reference.drafts",
        'for name in ("e_proj", "h_proj")',
        'for name in ("h_proj", "e_proj")',
    ),
    "MTP's token in one stream only": (
        "ops.drafts",
        "from_token.unsqueeze(1) + from_streams",
        "torch.cat([from_token.unsqueeze(1) + from_streams[:, :1], from_streams[:, 1:]], 1)",
    ),
    "MTP rotated by the table of compressed layers": ("config", "else RopeTable.WINDOW", "else RopeTable.COMPRESSED"),
    "MTP routed by token ids": ("config", "LayerKind.SWA, False)", "LayerKind.SWA, True)"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistake_is_seen(name: str) -> None:
    """By numbers, or by a tensor that a draft has not."""
    with mutated(*MISTAKES[name]):
        rig: Any = runpy.run_path(draft_rig.__file__)
        try:
            found = np.max([rig["mtp_error"]((17, TOKENS)), rig["dspark_error"]((17, TOKENS)), rig["wrong_tokens"]()])
        except KeyError as error:
            assert "tid2eid" in str(error)
            return
    assert not found < 100 * BOUND


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"dspark_block_size": 10}, "'dspark_block_size': expected an integer from 1 to 9, found 10"),
        ({"dspark_block_size": True}, "'dspark_block_size': expected an integer"),
        ({"dspark_markov_rank": 0}, "'dspark_markov_rank': expected an integer from 1"),
        ({"dspark_noise_token_id": CONFIG.vocab_size}, "'dspark_noise_token_id': expected an integer from 0"),
        ({"dspark_target_layer_ids": []}, "'dspark_target_layer_ids': expected a list of layers from 0 to 4"),
        ({"dspark_target_layer_ids": [1, 1]}, "each once, found [1, 1]"),
        ({"dspark_target_layer_ids": [4, 5]}, "found [4, 5]"),
        ({"compress_ratios": [0, 4, 128, 4, 128]}, "'compress_ratios': expected 5 entries, and a 0 for each of 1 to 8"),
        ({"compress_ratios": [0, 4, 128, 4, 128, 4]}, "'compress_ratios': expected 5 entries, and a 0 for each"),
        ({"dspark_depth": 2}, "'dspark_depth': expected no other than dspark_block_size, dspark_markov_rank,"),
        ({"dspark_config": {"block_size": 4}}, "'dspark_config': expected no other than dspark_block_size"),
        ({"dspark_markov_head_type": "gated"}, "'dspark_markov_head_type': expected null or 'vanilla'"),
        ({"sample_from_anchor": False}, "'sample_from_anchor': expected True"),
        ({"dspark_n_routed_experts": 4}, f"expected {CONFIG.n_routed_experts}, as n_routed_experts"),
        ({"dspark_num_experts_per_tok": 1}, f"expected {CONFIG.num_experts_per_tok}, as num_experts_per_tok"),
    ],
)
def test_dspark_fields_that_contradict(fields: dict[str, Any], message: str) -> None:
    raw = RAW | fields
    with pytest.raises(ConfigError, match=re.escape(message)):
        DsparkConfig.parse(raw, CONFIG)


def test_a_target_without_drafts_refuses() -> None:
    rig = Rig(mtp_specs(CONFIG))
    boundaries = replace(reference.boundaries(), mtp_input=None, dspark=None)
    context = replace(rig.context, boundaries=boundaries)
    for build in (lambda: MtpDraft(context), lambda: DsparkDraft(context, DSPARK)):
        with pytest.raises(UnsupportedError, match="this target computes none"):
            build()
