"""The model with no server around it: tokens in, logits out.

For tests, debugging and measurements. Slots, pages, rings and plans are those of the server, so what passes here
exercises the same code.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from nvfp4_sgl.cache.local import LocalCaches
from nvfp4_sgl.checkpoint.inventory import Inventory
from nvfp4_sgl.checkpoint.reader import CheckpointReader
from nvfp4_sgl.config import ModelConfig
from nvfp4_sgl.model.context import ModelContext
from nvfp4_sgl.model.decoder import Decoder
from nvfp4_sgl.ops.dispatch import Ops, reference_ops
from nvfp4_sgl.ops.linear import ActivationMode


class Standalone:
    """A decoder with embedding, LM head and caches on the CPU.

    Args:
        path: checkpoint directory.
        mode: what enters products with NVFP4 weights.
        packed: keep rows in SGLang's 8-bit entries instead of ``dtype``.
        dtype: model dtype.
        requests, capacity: sequences held at once, and tokens of each.
        ops: implementations; the CPU references unless given.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        mode: ActivationMode = ActivationMode.W4A16,
        packed: bool = False,
        dtype: torch.dtype = torch.float32,
        requests: int = 4,
        capacity: int = 2048,
        ops: Ops | None = None,
    ):
        self.config = ModelConfig.from_dir(path)
        inventory = Inventory.open(path)
        inventory.verify(self.config)
        reader = CheckpointReader(inventory)
        self._embed = reader.read("embed.weight").to(dtype)
        self._head = reader.read("head.weight").to(dtype)
        self.decoder = Decoder(ModelContext(reader, self.config, ops or reference_ops(), mode))
        reader.finish()
        self.caches = LocalCaches(self.config, requests=requests, capacity=capacity, packed=packed, dtype=dtype)

    def reset(self) -> None:
        """Forget every sequence; caches keep their stale contents, as a server's do."""
        self.caches.lengths = [0] * len(self.caches.lengths)

    @torch.no_grad()
    def extend(self, tokens: Mapping[int, Sequence[int]]) -> dict[int, Tensor]:
        """Append tokens to sequences; prefill, chunks and decode alike.

        Args:
            tokens: new token ids by request, at least one each.

        Returns:
            fp32 logits [new tokens, vocab] by request.
        """
        counts = {request: len(ids) for request, ids in tokens.items()}
        ids = torch.tensor([token for request in tokens for token in tokens[request]])
        streams = self.decoder.embed(ids, self._embed)
        hidden = self.decoder(streams, ids, self.caches.plan(counts), self.caches.layers)
        logits = hidden.float() @ self._head.float().t()
        return dict(zip(tokens, logits.split(list(counts.values())), strict=True))
