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
from torch import Tensor, nn

from nvfp4_sgl.cache.layout import DRAFTED_STATE_RING
from nvfp4_sgl.cache.local import LocalCaches
from nvfp4_sgl.checkpoint.names import dspark_specs, tensor_specs
from nvfp4_sgl.config import LayerKind, ModelConfig
from nvfp4_sgl.draft_config import DsparkConfig
from nvfp4_sgl.model.contract import Context, PassKind, PassRequest, Slots
from nvfp4_sgl.model.decoder import Decoder
from nvfp4_sgl.model.layer import Place
from nvfp4_sgl.serving.drafts import dspark_accept, dspark_context, dspark_model
from nvfp4_sgl.serving.drafts.dspark_backend import DsparkBackend
from nvfp4_sgl.serving.model import DeepseekV4ForCausalLM
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
        caches, self.backend.planner = self.plans(stages)
        self.backend.caches = caches.layers
        self.draft = dspark_model.DsparkForCausalLM.__new__(dspark_model.DsparkForCausalLM)
        nn.Module.__init__(self.draft)
        self.draft.dspark = DSPARK
        self.draft.build(self.context)
        embed, head = (SimpleNamespace(weight=weight) for weight in (self.table, self.head))
        self.draft.attach_shared_modules(embed_tokens=embed, lm_head=head)
        self.target_model = DeepseekV4ForCausalLM.__new__(DeepseekV4ForCausalLM)
        nn.Module.__init__(self.target_model)
        self.target_model.set_dspark_layers_to_capture(DSPARK.captured_layers)
        mapping = SimpleNamespace(full_to_swa_index_mapping=self.caches.full_to_swa)
        runner = SimpleNamespace(model=self.draft, attn_backend=self.backend, token_to_kv_pool=mapping)
        target = SimpleNamespace(model=self.target_model, token_to_kv_pool=mapping)
        worker = SimpleNamespace(target_worker=SimpleNamespace(model_runner=target), draft_model_runner=runner)
        dspark_context.init_backends(lambda worker: None, worker)

    def plans(self, config: ModelConfig) -> tuple[LocalCaches, ReferencePlanner]:
        """Caches of the layers of ``config``, and their planner."""
        caches = LocalCaches(config, requests=1, capacity=256, rings=DRAFTED_STATE_RING)
        slots = Slots(caches.slots, caches.full_to_swa, 1, 256, DRAFTED_STATE_RING)
        return caches, ReferencePlanner(self.context, slots, caches.layers)

    @torch.no_grad()
    def target(self, ids: Sequence[int], start: int, kind: PassKind) -> None:
        """A pass over ``ids``, from position ``start``, which writes the draft's context."""
        tokens, end = torch.tensor(ids), start + len(ids)
        added = torch.tensor([len(ids)]) if kind is PassKind.EXTEND else None
        positions, each = torch.arange(start, end), 1 if kind is PassKind.EXTEND else len(ids)
        request = PassRequest(
            positions, torch.tensor([0]), torch.tensor([end]), kind, added, tokens_each=each, longest=end
        )
        streams = self.decoder.embed(tokens, self.table)
        step = self.planner.plan(request)
        self.target_model._feed_context(self.decoder.walk(streams, tokens, step, self.caches.layers), step)

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
        tokens, _ = dspark_accept.guess(
            print, markov_head=self.draft.markov_head, base_logits=logits[None], anchor_tokens=ids[:1]
        )
        return logits, tokens[0].tolist()

    def verify(self, length: int, accepted: int) -> None:
        """A round's rows, of which so many hold the answer's tokens; the guesses behind them are wrong."""
        rows = [*IDS[length : length + accepted], *[3] * (BLOCK + 1 - accepted)]
        self.target(rows, length, PassKind.VERIFY)


@torch.no_grad()
def streams_behind(served: Served, layers: Sequence[int]) -> list[Any]:
    """The target's streams [T, n, d] behind ``layers``, of all of :data:`IDS` in one pass."""
    tokens, end = torch.tensor(IDS), len(IDS)
    request = PassRequest(
        torch.arange(end), torch.tensor([0]), torch.tensor([end]), PassKind.EXTEND, torch.tensor([end]), longest=end
    )
    streams = served.decoder.embed(tokens, served.table)
    walk = served.decoder.walk(streams, tokens, served.planner.plan(request), served.caches.layers)
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
        served.target(IDS[start:end], start, PassKind.EXTEND)
        start = end
    errors = []
    for accepted in (*ACCEPTED, 0):
        logits, guesses = served.guess(start)
        ids = [IDS[start], *[RAW["dspark_noise_token_id"]] * (BLOCK - 1)]
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
