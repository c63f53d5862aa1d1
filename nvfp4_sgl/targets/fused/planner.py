"""Plans of passes on a GPU: slots are resolved on the device, for decode inside the captured graph."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from nvfp4_sgl.cache.layer import LayerCache
from nvfp4_sgl.model.contract import Context, PassRequest, Slots
from nvfp4_sgl.model.decoder import Decoder
from nvfp4_sgl.model.dspark import DsparkDraft
from nvfp4_sgl.model.mtp import MtpDraft
from nvfp4_sgl.targets.fused.attention import packed
from nvfp4_sgl.targets.fused.step import Scratch, Step, device_frequencies, score_rows
from nvfp4_sgl.targets.fused.warm_up import warm_up_passes
from nvfp4_sgl.triton_kernels.hyper_connection.streams import expand_streams


class FusedPlanner:
    """Prepares a :class:`Step` for every pass.

    A captured graph reads lengths, positions and request slots from its caller's tensors and resolves slots in its
    first kernels. Eager passes whose sizes follow from the number of tokens use the same maxima, so that both give the
    same bits.
    """

    def __init__(self, context: Context, slots: Slots, caches: Sequence[LayerCache]):
        for cache in caches:
            packed(cache.swa)  # refuse exact rows here rather than at the first request
        self.context, self.slots, self.caches = context, slots, caches
        self.scratch = Scratch(context.device)
        self._frequencies = device_frequencies(context.config, context.device)
        self._scores: dict[int, Tensor] = {}
        self._added: dict[tuple[int, int], Tensor] = {}
        self._captured: list[Step] = []

    def allocate(self, request: PassRequest, *, scores: Tensor | None = None) -> Step:
        """Room for a pass, not filled; ``scores`` as in :meth:`Step.allocate`."""
        longest = self.slots.longest
        if not request.kind.is_by_size and request.longest is not None:
            longest = request.longest
        return Step.allocate(
            self.context.config,
            self.scratch,
            request.positions,
            request.requests,
            self.slots.table,
            self.slots.full_to_swa,
            longest=longest,
            kind=request.kind,
            policy=self.context.policy,
            rings=self.slots.rings,
            scores=scores,
        )

    def plan(self, request: PassRequest) -> Step:
        """A filled step for one eager pass."""
        step = self.allocate(request)
        self.fill(step, request)
        return step

    def reserve(self, tokens: int) -> None:
        """Allocate index scores for the largest graph; graphs run one at a time and share them."""
        self._scores[self.slots.longest] = self._new_scores(tokens, self.slots.longest)

    def _new_scores(self, rows: int, longest: int) -> Tensor:
        return Step.new_scores(self.context.config, rows, longest, self.context.device)

    def capture(self, request: PassRequest) -> Step:
        """Room for a pass that is about to be captured; :meth:`fill` is part of the graph.

        It stays allocated as long as this planner: the graph holds its addresses, and nothing else need hold the step.
        Freed, it would be others' memory, or after ``torch.cuda.empty_cache`` nobody's, when the graph is replayed.
        """
        step = self.allocate(request, scores=self._shared_scores(request))
        self._captured.append(step)
        self._tokens_added(request)
        return step

    def _shared_scores(self, request: PassRequest) -> Tensor:
        """The index scores of a pass that is about to be captured, which other graphs use, too.

        Prompts have their own where too few are reserved, or for shorter sequences: what is captured first is largest.
        """
        tokens = request.positions.shape[0]
        if request.kind.is_by_size:
            scores = self._scores.get(self.slots.longest)
            assert scores is not None, "reserve has not run"
            assert tokens <= len(scores), f"reserve has run for {len(scores)} tokens, the pass has {tokens}"
            return scores
        assert request.longest is not None, "a prompt is captured for a longest sequence"
        rows, scores = score_rows(tokens, request.longest), self._scores.get(request.longest)
        if scores is None or len(scores) < rows:
            scores = self._scores[request.longest] = self._new_scores(rows, request.longest)
        return scores

    def fill(self, step: Step, request: PassRequest) -> None:
        """Fill a step on the device; kernels only."""
        step.prepare(self._frequencies, request.ends, self._tokens_added(request))

    def _tokens_added(self, request: PassRequest) -> Tensor | None:
        """Tokens that each request adds, int [B]; ``None`` if each adds one.

        Made before a capture, because a captured graph must not fill memory.
        """
        if request.added is not None or request.tokens_each == 1:
            return request.added
        key = (request.requests.shape[0], request.tokens_each)
        if key not in self._added:
            self._added[key] = torch.full((key[0],), key[1], dtype=torch.int32, device=self.context.device)
        return self._added[key]

    @property
    def block(self) -> int:
        """Tokens of a block that the passes' draft guesses at once; 0 if it guesses none so."""
        draft = self.context.draft
        return 0 if draft is None else draft.block

    def warm_up_passes(self, tokens: int) -> Iterator[PassRequest]:
        """Passes that compile every kernel variant that passes of up to ``tokens`` tokens can need."""
        return warm_up_passes(self.slots, tokens, self.context.parallel, block=self.block)

    @torch.no_grad()
    def warm_up(self, decoder: Decoder | MtpDraft | DsparkDraft, table: Tensor, tokens: int) -> None:
        """Run a layer of each kind, or a draft, on every pass of :meth:`warm_up_passes`."""
        for request in self.warm_up_passes(tokens):
            step, ids = self.plan(request), torch.zeros_like(request.positions)
            embedded = table[:1].expand(len(ids), -1).contiguous()
            if isinstance(decoder, MtpDraft | DsparkDraft):
                self.draft(decoder, embedded, step)
                continue
            # Ranks of a split vocabulary start from embeddings rather than ids.
            decoder.expand(embedded)
            decoder(decoder.embed(ids, table), ids, step, self.caches, only=decoder.distinct_layers())

    def draft(self, draft: MtpDraft | DsparkDraft, embedded: Tensor, step: Step) -> None:
        """Run ``draft`` as a pass of a server does, with any values."""
        streams, ids = (
            expand_streams(embedded, self.context.config.hc_mult),
            torch.zeros_like(step.plan.batch.positions),
        )
        if isinstance(draft, MtpDraft):
            draft(embedded, streams, ids, step, self.caches[0])
        elif step.plan.is_block:
            requests, vocabulary = len(step.plan.batch.requests), len(draft.guesses.w2)
            hidden = draft(streams, ids, step, self.caches)
            logits = hidden.new_zeros(requests, len(ids) // requests, vocabulary, dtype=torch.float32)
            draft.guesses.choose(logits, ids.view(requests, -1)[:, 0])
        else:
            draft.inject(draft.means([streams] * len(draft.dspark.captured_layers)), step, self.caches)
