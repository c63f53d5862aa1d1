"""A checkpoint's DSpark draft with no server: what it makes of a sequence, from the target's streams of all of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from nvfp4_sgl.cache.local import LocalCaches
from nvfp4_sgl.checkpoint.reader import reader_for
from nvfp4_sgl.checkpoint.verified import verify
from nvfp4_sgl.config import LayerKind
from nvfp4_sgl.draft_config import DsparkConfig
from nvfp4_sgl.model.contract import PassKind, PassRequest, Slots
from nvfp4_sgl.model.dspark import DsparkDraft
from nvfp4_sgl.model.layer import Place
from nvfp4_sgl.ops.drafts import markov_bias
from nvfp4_sgl.standalone import Standalone
from nvfp4_sgl.targets.reference.planner import ReferencePlanner


class DraftAlone:
    """The draft behind one sequence, which is walked through from its beginning to its end."""

    def __init__(self, checkpoint: Path, target: Standalone, sequence: Sequence[int]):
        verified = verify(checkpoint)
        self.target, self.sequence = target, sequence
        self.dspark = DsparkConfig.parse(verified.raw, verified.config)
        reader = reader_for(verified.inventory, "cpu", of_draft=True)
        context = replace(target.decoder.context, source=reader)
        self.draft = DsparkDraft(context, self.dspark)
        stages = self.dspark.stages
        config = replace(verified.config, num_hidden_layers=stages, layer_kinds=(LayerKind.SWA,) * stages)
        self.caches = LocalCaches(config, requests=1, capacity=1024)
        slots = Slots(self.caches.slots, self.caches.full_to_swa, 1, 1024)
        self.planner = ReferencePlanner(context, slots, self.caches.layers)
        self.streams, self.injected = self.captured(), 0

    @torch.no_grad()
    def captured(self) -> list[Tensor]:
        """Streams [T, n, d] behind the captured layers, of the whole sequence."""
        target = self.target
        target.reset()
        work = target.begin({0: self.sequence})
        streams = target.decoder.embed(work.ids, target.table)
        walk = target.decoder.walk(streams, work.ids, work.step, target.caches.layers)
        found = {}
        for place in walk:
            if place is Place.INPUT:
                found[walk.sublayer.name] = walk.streams.clone()
        return [found.get(f"layers.{layer + 1}.attn", walk.streams) for layer in self.dspark.captured_layers]

    def _step(self, start: int, end: int, kind: PassKind) -> object:
        request = PassRequest(
            torch.arange(start, end), torch.tensor([0]), torch.tensor([end]), kind, torch.tensor([end - start])
        )
        return self.planner.plan(request)

    @torch.no_grad()
    def disagreement(self, length: int, guesses: Sequence[int]) -> float:
        """By how much a guess behind the first ``length`` tokens and the next one is less likely than the likeliest."""
        if self.injected < length:
            means = self.draft.means([streams[self.injected : length] for streams in self.streams])
            self.draft.inject(means, self._step(self.injected, length, PassKind.EXTEND), self.caches.layers)
            self.injected = length
        block = len(guesses)
        anchor = self.sequence[length]
        ids = torch.tensor([anchor, *[self.dspark.noise_token] * (block - 1)])
        streams = self.target.decoder.embed(ids, self.target.table)
        hidden = self.draft(streams, ids, self._step(length, length + block, PassKind.BLOCK), self.caches.layers)
        before = torch.tensor([anchor, *guesses[:-1]])
        logits = self.target.logits(hidden) + markov_bias(before, self.draft.guesses.w1, self.draft.guesses.w2)
        chosen = logits[torch.arange(block), torch.tensor(guesses)]
        return float((logits.amax(-1) - chosen).max())
