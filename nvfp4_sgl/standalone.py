"""The model with no server around it: tokens in, logits out, on any target.

For tests, debugging and measurements. Slots, pages, rings and plans are those of the server, so what passes here
exercises the same code.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nvfp4_sgl.cache.layout import STATE_RING, Rings
from nvfp4_sgl.cache.local import LocalCaches
from nvfp4_sgl.checkpoint.verified import Verified, verify
from nvfp4_sgl.model.contract import Context, PassKind, PassRequest, Slots
from nvfp4_sgl.model.decoder import Decoder
from nvfp4_sgl.model.policy import Policy
from nvfp4_sgl.ops.modes import ActivationMode
from nvfp4_sgl.targets.choose import choose
from nvfp4_sgl.targets.fused.gemm_bf16 import multiply
from nvfp4_sgl.targets.target import CPU, descriptor
from nvfp4_sgl.weights.layout import held_elsewhere
from nvfp4_sgl.weights.parallel import TensorParallel


@dataclass(frozen=True)
class Pass:
    """Tokens to append, int64 [T], and where they stand."""

    ids: Tensor
    request: PassRequest
    step: Any


class Standalone:
    """A decoder with embedding, LM head and caches.

    Args:
        model: checkpoint directory, or a model that was verified already, as random weights are.
        target: whose boundaries run.
        device: a CUDA device for a GPU target, or the CPU under Triton's interpreter; for the CPU target the one that
            torch makes tensors on, which is the CPU unless each pass is inside ``with torch.device(...)``.
        mode: what enters GEMMs with quantised weights; the target's default unless given.
        packed: keep rows in SGLang's 8-bit entries instead of ``dtype``; GPU targets always do.
        dtype: model dtype; GPU targets take bf16.
        requests, capacity: sequences held at once, and tokens of each.
        parallel: this rank's share.
        uniform_experts: simulate uniform routing.
        layers: those that are loaded, all unless given. With fewer there are no embedding and LM head: call ``decoder``
            with the streams before them.
        rings: rows of the compressors' state rings.
        policy: what may depend on the number of tokens.
    """

    def __init__(
        self,
        model: str | Path | Verified,
        *,
        target: str = CPU.word,
        device: torch.device | str = "cpu",
        mode: ActivationMode | None = None,
        packed: bool = False,
        dtype: torch.dtype = torch.float32,
        requests: int = 4,
        capacity: int = 2048,
        parallel: TensorParallel | None = None,
        uniform_experts: bool = False,
        layers: range | None = None,
        rings: Rings = STATE_RING,
        policy: Policy | None = None,
    ):
        choice = choose(target, mode)
        if descriptor(target).on_gpu:
            packed, dtype = True, torch.bfloat16
        self.device, self.dtype = torch.device(device), dtype
        verified = model if isinstance(model, Verified) else verify(model)
        self.config, reader = verified.config, verified.reader(self.device)
        if layers is None:
            self.table, self.head = (reader.read(f"{name}.weight").to(self.device, dtype) for name in ("embed", "head"))
        context = Context(
            reader,
            self.config,
            choice.boundaries,
            self.device,
            dtype,
            choice.mode,
            parallel or TensorParallel(),
            uniform_experts,
            policy or Policy(),
        )
        self.decoder = Decoder(context, layers)
        if layers is None:
            reader.finish(held_elsewhere(self.config, context.parallel))
        else:
            reader.check_read()
        self.caches = LocalCaches(
            self.config,
            requests=requests,
            capacity=capacity,
            packed=packed,
            dtype=dtype,
            device=self.device,
            rings=rings,
        )
        full_to_swa = self.caches.full_to_swa.to(self.device)
        self._table = self.caches.slots.int().to(self.device)
        slots = Slots(self._table, full_to_swa, requests, self.caches.capacity, rings)
        self.planner: Any = choice.boundaries.plan(context, slots, self.caches.layers)

    def reset(self) -> None:
        """Forget every sequence; caches keep their stale contents, as a server's do."""
        self.caches.lengths = [0] * len(self.caches.lengths)

    def share_prefix(self, source: int, target: int, pages: int) -> None:
        """Let ``target`` begin with the first whole pages of ``source``, as after a hit in the prefix cache."""
        self.caches.share_prefix(source, target, pages)
        self._table.copy_(self.caches.slots)

    def extend(self, tokens: Mapping[int, Sequence[int]]) -> dict[int, Tensor]:
        """Append tokens to sequences; prefill, chunks and decode alike.

        Args:
            tokens: new token ids by request, at least one each.

        Returns:
            fp32 logits [new tokens, vocab] by request, on the device.
        """
        logits = self.forward(self.begin(tokens))
        return dict(zip(tokens, logits.split([len(ids) for ids in tokens.values()]), strict=True))

    def request(self, tokens: Mapping[int, Sequence[int]]) -> PassRequest:
        """The pass that appends these tokens; the sequences count them as theirs from now on."""
        counts = {request: len(ids) for request, ids in tokens.items()}
        starts, ends = self.caches.advance(counts)
        positions = torch.cat([torch.arange(start, end) for start, end in zip(starts, ends, strict=True)])
        # int32 as in SGLang's batches: Triton compiles apart for another type.
        added = torch.tensor(list(counts.values()), dtype=torch.int32).to(self.device)
        requests = torch.tensor(list(counts))
        kind = PassKind.DECODE if set(counts.values()) == {1} else PassKind.EXTEND
        return PassRequest(
            positions.to(self.device),
            requests.to(self.device),
            torch.tensor(ends).to(self.device),
            kind,
            added if kind is PassKind.EXTEND else None,
            longest=max(ends),
        )

    @torch.no_grad()
    def begin(self, tokens: Mapping[int, Sequence[int]]) -> Pass:
        """The planned pass that :meth:`extend` makes of ``tokens``."""
        request = self.request(tokens)
        ids = torch.tensor([token for request_ids in tokens.values() for token in request_ids]).to(self.device)
        return Pass(ids, request, self.planner.plan(request))

    @torch.no_grad()
    def forward(self, work: Pass) -> Tensor:
        """fp32 logits [T, vocab] of a planned pass; on a GPU kernels only, so that a graph can hold it."""
        streams = self.decoder.embed(work.ids, self.table)
        return self.logits(self.decoder(streams, work.ids, work.step, self.caches.layers))

    def logits(self, hidden: Tensor) -> Tensor:
        """fp32 [T, vocab] of hidden states [T, d]."""
        return multiply(hidden, self.head, torch.float32)
