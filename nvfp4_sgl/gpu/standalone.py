"""The GPU decoder with no server around it: tokens in, logits out. See :mod:`nvfp4_sgl.model.standalone`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from nvfp4_sgl.cache.local import LocalCaches
from nvfp4_sgl.checkpoint.inventory import Inventory
from nvfp4_sgl.checkpoint.reader import CheckpointReader
from nvfp4_sgl.config import ModelConfig
from nvfp4_sgl.gpu.context import GpuContext
from nvfp4_sgl.gpu.decoder import GpuDecoder
from nvfp4_sgl.gpu.products import multiply
from nvfp4_sgl.gpu.step import Step
from nvfp4_sgl.model.parallel import TensorParallel


@dataclass(frozen=True)
class Pass:
    """Tokens to append, and where they stand.

    Attributes:
        ids: int64 [T]. step: not prepared yet.
        ends: int64 [B], lengths afterwards. added: int64 [B], tokens of each request; ``None`` in decode.
    """

    ids: Tensor
    step: Step
    ends: Tensor
    added: Tensor | None


class GpuStandalone:
    """A decoder with embedding, LM head and packed caches on ``device``.

    Args:
        path: checkpoint directory.
        device: a CUDA device, or the CPU under Triton's interpreter.
        requests, capacity: sequences held at once, and tokens of each.
        parallel: this rank's share.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        device: torch.device | str = "cuda",
        requests: int = 4,
        capacity: int = 2048,
        parallel: TensorParallel | None = None,
    ):
        self.device = torch.device(device)
        self.config = ModelConfig.from_dir(path)
        inventory = Inventory.open(path)
        inventory.verify(self.config)
        reader = CheckpointReader(inventory)
        self.table = reader.read("embed.weight").to(self.device).bfloat16()
        self._head = reader.read("head.weight").to(self.device).bfloat16()
        parallel = parallel or TensorParallel()
        self.decoder = GpuDecoder(GpuContext(reader, self.config, self.device, parallel=parallel))
        reader.finish()
        self.caches = LocalCaches(self.config, requests=requests, capacity=capacity, packed=True, device=self.device)
        self.slots = self.caches.slots.int().to(self.device)

    def reset(self) -> None:
        """Forget every sequence; caches keep their stale contents, as a server's do."""
        self.caches.lengths = [0] * len(self.caches.lengths)

    def extend(self, tokens: Mapping[int, Sequence[int]]) -> dict[int, Tensor]:
        """Append tokens to sequences; prefill, chunks and decode alike.

        Args:
            tokens: new token ids by request, at least one each.

        Returns:
            fp32 logits [new tokens, vocab] by request, on the device.
        """
        logits = self.forward(self.begin(tokens))
        return dict(zip(tokens, logits.split([len(ids) for ids in tokens.values()]), strict=True))

    def begin(self, tokens: Mapping[int, Sequence[int]]) -> Pass:
        """The pass that :meth:`extend` makes of ``tokens``; the sequences count them as theirs already."""
        counts = {request: len(ids) for request, ids in tokens.items()}
        batch = self.caches.advance(counts)
        added = batch.ends - batch.starts
        spans = zip(batch.starts.tolist(), batch.ends.tolist(), strict=True)
        positions = torch.cat([torch.arange(start, end) for start, end in spans])
        ids = torch.tensor([token for request in tokens for token in tokens[request]]).to(self.device)
        decode = set(counts.values()) == {1}
        step = Step.allocate(
            self.config,
            self.decoder.scratch,
            positions.to(self.device),
            batch.requests.to(self.device),
            self.slots,
            batch.full_to_swa.to(self.device),
            longest=self.caches.capacity if decode else int(batch.ends.max()),
            decode=decode,
        )
        return Pass(ids, step, batch.ends.to(self.device), None if decode else added.to(self.device))

    @torch.no_grad()
    def forward(self, work: Pass) -> Tensor:
        """fp32 logits [T, vocab] of a pass; kernels only, so that a graph can hold it."""
        work.step.prepare(self.decoder.frequencies, work.ends, work.added)
        hidden = self.decoder(self.embed(work.ids), work.ids, work.step, self.caches.layers)
        return self.logits(hidden)

    def embed(self, ids: Tensor) -> Tensor:
        """Residual streams bf16 [T, n, d]."""
        return self.decoder.embed(ids, self.table)

    def logits(self, hidden: Tensor) -> Tensor:
        """fp32 [T, vocab] of hidden states bf16 [T, d]."""
        return multiply(hidden, self._head, torch.float32)
