"""DSpark's rounds as SGLang's worker runs them, without a server: our hooks and models over caches of our own.

Import nothing else of a test here: planted mistakes run this file anew (:func:`runpy.run_path`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from sglang.srt.speculative.dspark_components.dspark_draft import DraftNoise, draft_markov_block
from torch import Tensor, nn

from nvfp4_sgl.cache.layer import LayerCache
from nvfp4_sgl.cache.layout import DRAFTED_STATE_RING
from nvfp4_sgl.cache.local import LocalCaches
from nvfp4_sgl.checkpoint.names import dspark_specs, tensor_specs
from nvfp4_sgl.config import LayerKind, ModelConfig
from nvfp4_sgl.draft_config import DsparkConfig
from nvfp4_sgl.model.capture import captured_means
from nvfp4_sgl.model.contract import Context, PassKind, PassRequest, Slots
from nvfp4_sgl.model.decoder import Decoder
from nvfp4_sgl.model.layer import Place
from nvfp4_sgl.serving.drafts import dspark_context, dspark_model
from nvfp4_sgl.serving.drafts.dspark_backend import DsparkBackend
from nvfp4_sgl.synthetic.tiny_weights import draw
from nvfp4_sgl.targets import reference
from nvfp4_sgl.targets.reference.planner import ReferencePlanner
from tests.support.draft_rig import BLOCK, CAPTURED, RAW, STAGES
from tests.support.drawn_source import DrawnSource
from tests.support.numpy_draft import NumpyDraft

CONFIG = ModelConfig.from_dict(RAW)
DSPARK = DsparkConfig.parse(RAW, CONFIG)

IDS = torch.randint(0, CONFIG.vocab_size, (60,), generator=torch.Generator().manual_seed(6)).tolist()
"""A prompt and its answer: more than three windows of the tiny model."""
CHUNKS = (20, 37)
"""Where the chunks of the prompt end."""
ACCEPTED = (3, BLOCK + 1)
"""Rows of each round that are accepted: some, and all of them. Behind each another block is guessed."""


class Served:
    """A target and its draft behind the hooks, for one request."""

    def __init__(self) -> None:
        specs = {**tensor_specs(CONFIG), **dspark_specs(CONFIG, DSPARK)}
        self.source = DrawnSource({}, 4, CONFIG.n_routed_experts)
        # Drawn here: a mistake that is planted comes with fresh modules, and kinds of tensors of their own.
        self.source.tensors = {spec.key: draw(spec, 4, experts=CONFIG.n_routed_experts) for spec in specs.values()}
        self.context = Context(self.source, CONFIG, reference.boundaries())
        self.decoder = Decoder(self.context)
        self.caches, self.planner = self.plans(CONFIG)
        self.table, self.head = (self.source.read(f"{name}.weight").float() for name in ("embed", "head"))

        stages = replace(CONFIG, num_hidden_layers=STAGES, layer_kinds=(LayerKind.SWA,) * STAGES)
        self.backend = DsparkBackend.__new__(DsparkBackend)
        self.backend.caches, self.backend.planner = self.plans(stages)
        self.draft = dspark_model.DsparkForCausalLM.__new__(dspark_model.DsparkForCausalLM)
        nn.Module.__init__(self.draft)
        self.draft.dspark = DSPARK
        self.draft.build(self.context)
        embed, head = (SimpleNamespace(weight=weight) for weight in (self.table, self.head))
        self.draft.attach_shared_modules(embed_tokens=embed, lm_head=head)
        runner = SimpleNamespace(attn_backend=self.backend)
        self.injector = SimpleNamespace(draft_model=self.draft, draft_model_runner=runner)

    def plans(self, config: ModelConfig) -> tuple[list[LayerCache], ReferencePlanner]:
        """Caches of the layers of ``config``, and their planner."""
        caches = LocalCaches(config, requests=1, capacity=256, rings=DRAFTED_STATE_RING)
        slots = Slots(caches.slots, caches.full_to_swa, 1, 256, DRAFTED_STATE_RING)
        return caches.layers, ReferencePlanner(self.context, slots, caches.layers)

    @torch.no_grad()
    def target(self, ids: Sequence[int], start: int, kind: PassKind) -> Tensor:
        """The means that a pass over ``ids``, from position ``start``, gives the draft."""
        tokens, end = torch.tensor(ids), start + len(ids)
        added = torch.tensor([len(ids)]) if kind is PassKind.EXTEND else None
        positions, each = torch.arange(start, end), 1 if kind is PassKind.EXTEND else len(ids)
        request = PassRequest(
            positions, torch.tensor([0]), torch.tensor([end]), kind, added, tokens_each=each, longest=end
        )
        streams = self.decoder.embed(tokens, self.table)
        walk = self.decoder.walk(streams, tokens, self.planner.plan(request), self.caches)
        return captured_means(walk, DSPARK.captured_layers)

    def prefill(self, start: int, end: int) -> None:
        """A chunk of the prompt."""
        batch = SimpleNamespace(
            extend_lens=[end - start],
            prefix_lens=[start],
            req_pool_indices=torch.tensor([0]),
            seq_lens=torch.tensor([end]),
        )
        placed = dspark_context.place_prefill(print, self.injector, batch)
        means = self.target(IDS[start:end], start, PassKind.EXTEND)
        dspark_context.inject_prefill(print, self.injector, placed, target_hidden=means)

    @torch.no_grad()
    def guess(self, length: int) -> tuple[Tensor, list[int]]:
        """(logits [BLOCK, vocabulary] without the tokens' bias, guesses) behind ``length`` tokens and the next one."""
        ids = torch.tensor([IDS[length]] + [DSPARK.noise_token] * (BLOCK - 1))
        batch = SimpleNamespace(
            forward_mode=SimpleNamespace(is_idle=lambda: False),
            positions=torch.arange(length, length + BLOCK),
            req_pool_indices=torch.tensor([0]),
            seq_lens=torch.tensor([length]),
            spec_info=SimpleNamespace(draft_token_num=BLOCK),
        )
        self.backend.init_forward_metadata(batch)
        with patch.object(dspark_model, "planned_backend", lambda: self.backend):
            hidden = self.draft(ids, batch.positions, batch).hidden_states
        logits, _ = self.draft.compute_base_logits(hidden)
        tokens, _ = draft_markov_block(
            markov_head=self.draft.markov_head,
            base_logits=logits[None],
            anchor_tokens=ids[:1],
            draft_hidden=None,
            step_temperatures=torch.zeros(1),
            noise=DraftNoise(key=1, offset=torch.zeros(1, dtype=torch.int64)),
            tp_sync=SimpleNamespace(sync=lambda site, values: values),
            greedy_draft=True,
        )
        return logits, tokens[0].tolist()

    def verify(self, length: int, accepted: int) -> None:
        """A round's rows, of which so many hold the answer's tokens; the guesses behind them are wrong."""
        rows = [*IDS[length : length + accepted], *[3] * (BLOCK + 1 - accepted)]
        means = self.target(rows, length, PassKind.VERIFY)
        positions = torch.arange(length, length + BLOCK + 1)
        dspark_context.commit(
            print,
            SimpleNamespace(kv_injector=self.injector),
            batch=SimpleNamespace(req_pool_indices=torch.tensor([0]), seq_lens=torch.tensor([length])),
            verify_window=SimpleNamespace(positions_2d=positions[None]),
            logits_output=SimpleNamespace(hidden_states=means),
        )


@torch.no_grad()
def streams_behind(served: Served, layers: Sequence[int]) -> list[Any]:
    """The target's streams [T, n, d] behind ``layers``, of all of :data:`IDS` in one pass."""
    tokens, end = torch.tensor(IDS), len(IDS)
    request = PassRequest(
        torch.arange(end), torch.tensor([0]), torch.tensor([end]), PassKind.EXTEND, torch.tensor([end]), longest=end
    )
    streams = served.decoder.embed(tokens, served.table)
    walk = served.decoder.walk(streams, tokens, served.planner.plan(request), served.caches)
    found = {}
    for place in walk:
        if place is Place.INPUT:
            found[walk.sublayer.name] = walk.streams.double().numpy().copy()
    last = walk.streams.double().numpy()
    return [found.get(f"layers.{layer + 1}.attn", last) for layer in layers]


def worst() -> float:
    """The largest error of logits, by the largest one; infinite where a guess differs."""
    served = Served()
    arrays = {name: tensor.double().numpy() for name, tensor in served.source.tensors.items()}
    numpy, seen = NumpyDraft(arrays, RAW), streams_behind(served, CAPTURED)
    start = 0
    for end in CHUNKS:
        served.prefill(start, end)
        start = end
    errors = []
    for accepted in (*ACCEPTED, 0):
        logits, guesses = served.guess(start)
        ids = [IDS[start], *[DSPARK.noise_token] * (BLOCK - 1)]
        hidden = numpy.dspark([streams[:start] for streams in seen], arrays["embed.weight"][ids], STAGES)[0]
        expected = hidden @ arrays["head.weight"].T
        errors.append(np.abs(logits.double().numpy() - expected).max() / np.abs(expected).max())
        stem, before = f"mtp.{STAGES - 1}.markov_head.markov", IDS[start]
        for row, guess in zip(expected, guesses, strict=True):
            bias = arrays[f"{stem}_w2.weight"] @ arrays[f"{stem}_w1.weight"][before]
            before = int((row + bias).argmax())
            errors.append(0.0 if guess == before else np.inf)
        if accepted:
            served.verify(start, accepted)
            start += accepted
    return float(max(errors))
