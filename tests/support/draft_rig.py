"""Drafts over random tensors and one sequence, each pass beside NumPy's.

Import nothing else of a test here: planted mistakes run this file anew (:func:`runpy.run_path`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nvfp4_sgl.cache.local import LocalCaches
from nvfp4_sgl.checkpoint.names import dspark_specs, mtp_specs
from nvfp4_sgl.config import LayerKind, ModelConfig
from nvfp4_sgl.draft_config import DsparkConfig
from nvfp4_sgl.model.contract import Context, PassKind, PassRequest, Slots
from nvfp4_sgl.model.dspark import DsparkDraft
from nvfp4_sgl.model.mtp import MtpDraft
from nvfp4_sgl.ops.drafts import draft_greedily
from nvfp4_sgl.synthetic.tiny_config import TinyFormat, tiny_config
from nvfp4_sgl.targets import reference
from nvfp4_sgl.targets.reference.planner import ReferencePlanner
from tests.support.drawn_source import DrawnSource
from tests.support.numpy_draft import Array, NumpyDraft

STAGES, BLOCK, RANK, CAPTURED = 3, 5, 8, [1, 3, 4]
TOKENS = 41
"""More than two windows of the tiny model."""


RATIOS = [0, 4, 128, 4, 128, *[0] * STAGES]
RAW = tiny_config(TinyFormat.BF16, {"sliding_window": 16, "compress_ratios": RATIOS}) | {
    "dspark_block_size": BLOCK,
    "dspark_markov_rank": RANK,
    "dspark_noise_token_id": 7,
    "dspark_target_layer_ids": CAPTURED,
}
CONFIG = ModelConfig.from_dict(RAW)
DSPARK = DsparkConfig.parse(RAW, CONFIG)


class Rig:
    """Caches of a draft's blocks for one sequence, and passes over them."""

    def __init__(self, specs: Any, seed: int = 3):
        self.source = DrawnSource(specs, seed, CONFIG.n_routed_experts)
        self.context = Context(self.source, CONFIG, reference.boundaries())
        # Window-only layers, as many as there are stages.
        config = replace(CONFIG, num_hidden_layers=STAGES, layer_kinds=(LayerKind.SWA,) * STAGES)
        self.caches = LocalCaches(config, requests=1, capacity=256)
        slots = Slots(self.caches.slots, self.caches.full_to_swa, 1, 256)
        self.planner = ReferencePlanner(self.context, slots, self.caches.layers)
        arrays = {name: tensor.double().numpy() for name, tensor in self.source.tensors.items()}
        self.numpy = NumpyDraft(arrays, RAW)

    def step(self, start: int, end: int, *, is_block: bool = False) -> Any:
        added = torch.tensor([end - start])
        positions = torch.arange(start, end)
        kind = PassKind.BLOCK if is_block else PassKind.EXTEND
        request = PassRequest(positions, torch.tensor([0]), torch.tensor([end]), kind, added)
        return self.planner.plan(request)


def drawn(*shape: int, seed: int) -> Tensor:
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    x.flatten()[::97] *= 9  # outliers
    return x


def error(found: Tensor, expected: Array) -> float:
    return float(np.abs(found.double().numpy() - expected).max() / np.abs(expected).max())


STREAMS = drawn(TOKENS, CONFIG.hc_mult, CONFIG.hidden_size, seed=1)
EMBEDDED = drawn(TOKENS, CONFIG.hidden_size, seed=2)
ANCHOR = drawn(BLOCK, CONFIG.hidden_size, seed=5)
IDS = torch.arange(TOKENS)


def captured(tokens: int) -> list[Tensor]:
    """The target's streams behind its captured layers."""
    return [drawn(tokens, CONFIG.hc_mult, CONFIG.hidden_size, seed=10 + layer) for layer in CAPTURED]


@torch.no_grad()
def mtp_error(cuts: Sequence[int]) -> float:
    """Of hidden states and streams, in passes that end at ``cuts``."""
    rig = Rig(mtp_specs(CONFIG))
    draft = MtpDraft(rig.context)
    hidden, streams = [], []
    for start, end in zip((0, *cuts[:-1]), cuts, strict=True):
        part, step = slice(start, end), rig.step(start, end)
        found = draft(EMBEDDED[part], STREAMS[part], IDS[part], step, rig.caches.layers[0])
        hidden.append(found[0])
        streams.append(found[1])
    expected = rig.numpy.mtp(EMBEDDED.double().numpy(), STREAMS.double().numpy())
    return max(error(torch.cat(ours), theirs) for ours, theirs in zip((hidden, streams), expected, strict=True))


@torch.no_grad()
def dspark(rig: Rig, cuts: Sequence[int]) -> Tensor:
    """Hidden states of a block behind a context that is injected in passes that end at ``cuts``."""
    draft, seen = DsparkDraft(rig.context, DSPARK), captured(cuts[-1])
    for start, end in zip((0, *cuts[:-1]), cuts, strict=True):
        means = draft.means([streams[start:end] for streams in seen])
        draft.inject(means, rig.step(start, end), rig.caches.layers)
    return block(rig, draft, cuts[-1])


@torch.no_grad()
def block(rig: Rig, draft: DsparkDraft, start: int) -> Tensor:
    streams = ANCHOR.unsqueeze(1).expand(-1, CONFIG.hc_mult, -1).contiguous()
    step = rig.step(start, start + BLOCK, is_block=True)
    return draft(streams, torch.full((BLOCK,), DSPARK.noise_token), step, rig.caches.layers)


def dspark_error(cuts: Sequence[int]) -> float:
    rig = Rig(dspark_specs(CONFIG, DSPARK))
    found, seen = dspark(rig, cuts), [streams.double().numpy() for streams in captured(cuts[-1])]
    return error(found, rig.numpy.dspark(seen, ANCHOR.double().numpy(), STAGES)[0])


def wrong_tokens() -> int:
    """Tokens of DSpark's greedy choice that NumPy chooses otherwise."""
    rig = Rig(dspark_specs(CONFIG, DSPARK))
    stem = f"mtp.{STAGES - 1}.markov_head.markov"
    w1, w2 = (rig.source.tensors[f"{stem}_{name}.weight"] for name in ("w1", "w2"))
    base, anchor = 0.1 * drawn(2, BLOCK, CONFIG.vocab_size, seed=9), torch.tensor([3, 4])
    wrong = 0
    for request, tokens in enumerate(draft_greedily(base, anchor, w1, w2).tolist()):
        before = int(anchor[request])
        for place, token in enumerate(tokens):
            bias = rig.numpy[f"{stem}_w2.weight"] @ rig.numpy[f"{stem}_w1.weight"][before]
            before = int((base[request, place].double().numpy() + bias).argmax())
            wrong += token != before
    return wrong
