"""Guesses outside a server, through the modules that servers run: the decoder, ``MtpDraft``, ``DsparkDraft``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from nvfp4_sgl.cache.layout import DRAFTED_STATE_RING
from nvfp4_sgl.cache.local import LocalCaches
from nvfp4_sgl.checkpoint.drafts import DraftKind, draft_kind, verify_draft
from nvfp4_sgl.checkpoint.reader import reader_for
from nvfp4_sgl.checkpoint.verified import Verified
from nvfp4_sgl.config import LayerKind
from nvfp4_sgl.draft_config import DsparkConfig
from nvfp4_sgl.formats.nvfp4 import quantize_weight
from nvfp4_sgl.model.contract import PassKind, PassRequest, Slots
from nvfp4_sgl.model.dspark import DsparkDraft
from nvfp4_sgl.model.layer import Place
from nvfp4_sgl.model.mtp import MtpDraft
from nvfp4_sgl.standalone import Standalone


class Target:
    """A checkpoint's decoder over one sequence."""

    def __init__(self, verified: Verified, capacity: int, **options: Any):
        self.model = Standalone(verified, requests=1, capacity=capacity, rings=DRAFTED_STATE_RING, **options)

    @torch.no_grad()
    def read(self, tokens: Sequence[int]) -> tuple[Tensor, list[Tensor]]:
        """Append tokens; (logits [T, vocabulary], streams [T, n, d] behind each layer)."""
        model = self.model
        work, behind = model.begin({0: tokens}), []
        walk = model.decoder.walk(model.decoder.embed(work.ids, model.table), work.ids, work.step, model.caches.layers)
        for place in walk:
            if place is Place.INPUT and walk.sublayer.name.endswith(".attn"):
                behind.append(walk.streams.clone())
        return model.logits(walk.x.require_values()), [*behind[1:], walk.all_streams()]


class Draft(Protocol):
    """Source of guesses."""

    def reset(self) -> None:
        """Forget the sequence."""

    def guess(self, streams: list[Tensor], tokens: Sequence[int]) -> list[int]:
        """The next guesses.

        Args:
            streams: of the target, behind each layer, [T, n, d] of the positions that were accepted since the last
                guess. tokens: the one behind each of them; the last one starts the round.
        """


class Rounded:
    """A reader whose matrices went through NVFP4."""

    def __init__(self, reader: Any):
        self.reader = reader

    def __getattr__(self, name: str) -> Any:
        return getattr(self.reader, name)

    def read_matrix(self, stem: str, rows: slice | None = None, cols: slice | None = None) -> Tensor:
        """The matrix, or a part of it, dequantised."""
        whole = quantize_weight(self.reader.read_matrix(stem)).dequantize()
        return whole[rows or slice(None), cols or slice(None)]


class Bundled:
    """The draft that a checkpoint bundles.

    Args:
        steps: how far MTP guesses.
        rounded: with every matrix rounded to NVFP4.
    """

    def __init__(self, target: Target, verified: Verified, steps: int, *, rounded: bool = False):
        self.target, self.steps, config = target, steps, verified.config
        kind = draft_kind(verified.inventory)
        verify_draft(verified.inventory, verified.raw, config)
        reader: Any = reader_for(verified.inventory, target.model.device, of_draft=True)
        context = replace(target.model.decoder.context, source=Rounded(reader) if rounded else reader)
        self.dspark = DsparkConfig.parse(verified.raw, config) if kind is DraftKind.DSPARK else None
        self.draft = MtpDraft(context) if self.dspark is None else DsparkDraft(context, self.dspark)
        stages = 1 if self.dspark is None else self.dspark.stages
        windows = replace(config, num_hidden_layers=stages, layer_kinds=(LayerKind.SWA,) * stages)
        own = target.model.caches
        self.caches = LocalCaches(windows, capacity=own.capacity, dtype=target.model.dtype)
        slots = Slots(self.caches.slots, self.caches.full_to_swa, 1, own.capacity)
        self.planner: Any = context.boundaries.plan(context, slots, self.caches.layers)
        self.length = 0

    def reset(self) -> None:
        self.length = 0

    def plan(self, start: int, end: int, kind: PassKind) -> Any:
        """The pass over these positions."""
        added = None if kind is PassKind.DECODE else torch.tensor([end - start])
        return self.planner.plan(
            PassRequest(torch.arange(start, end), torch.tensor([0]), torch.tensor([end]), kind, added)
        )

    @torch.no_grad()
    def guess(self, streams: list[Tensor], tokens: Sequence[int]) -> list[int]:
        start, self.length = self.length, self.length + len(tokens)
        step, model = self.plan(start, self.length, PassKind.EXTEND), self.target.model
        if isinstance(self.draft, DsparkDraft):
            assert self.dspark is not None
            means = self.draft.means([streams[layer] for layer in self.dspark.captured_layers])
            self.draft.inject(means, step, self.caches.layers)
            ids = torch.tensor([tokens[-1], *[self.dspark.noise_token] * (self.dspark.block - 1)])
            block = self.plan(self.length, self.length + self.dspark.block, PassKind.BLOCK)
            hidden = self.draft(model.decoder.embed(ids, model.table), ids, block, self.caches.layers)
            found: list[int] = self.draft.guesses.choose(model.logits(hidden)[None], ids[:1])[0].tolist()
            return found
        ids, seen, guesses = torch.tensor(tokens), streams[-1], list[int]()
        while True:
            hidden, own = self.draft(model.table[ids], seen, ids, step, self.caches.layers[0])
            guesses.append(int(model.logits(hidden[-1:]).argmax()))
            if len(guesses) == self.steps:
                return guesses
            ids, seen, place = torch.tensor(guesses[-1:]), own[-1:], self.length + len(guesses) - 1
            step = self.plan(place, place + 1, PassKind.DECODE)


class Lookup:
    """Prompt lookup: what followed the last tokens where they stood before, the longest such end that there is."""

    def __init__(self, count: int, longest: int = 4):
        self.count, self.longest, self.tokens = count, longest, list[int]()

    def reset(self) -> None:
        self.tokens = []

    def guess(self, streams: list[Tensor], tokens: Sequence[int]) -> list[int]:
        self.tokens += tokens
        for length in range(self.longest, 0, -1):
            end = self.tokens[-length:]
            for start in range(len(self.tokens) - length - 1, -1, -1):
                if self.tokens[start : start + length] == end:
                    return (self.tokens[start + length :] * self.count)[: self.count]
        return [0] * self.count
