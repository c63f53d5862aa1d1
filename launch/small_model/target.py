"""The frozen target of a checkpoint, as drafts are trained behind it."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from nvfp4_sgl.checkpoint.drafts import verify_draft
from nvfp4_sgl.checkpoint.names import MTP_PREFIX, tensor_specs
from nvfp4_sgl.checkpoint.verified import verify
from nvfp4_sgl.formats.nvfp4 import NvFp4Tensor
from small_model.export import named_tensors
from small_model.network import SmallModel
from small_model.task import (
    GROUP,
    MEASURED_KEYS,
    MEASURED_QUESTIONS,
    MEASURED_TOKENS,
    Document,
    far_document,
    training_document,
)

ROUNDS = 16
"""Most passes that write the target's answers; what is open after them stays a guess."""


@torch.no_grad()
def load_target(directory: Path, device: torch.device) -> SmallModel:
    """The decoder of a checkpoint of the small model, dequantised to fp32; its MTP block is left random."""
    verified = verify(directory)
    verify_draft(verified.inventory, verified.raw, verified.config)
    model, reader = SmallModel(verified.raw, seed=0), verified.reader()
    specs = {spec.key: spec for spec in tensor_specs(verified.config).values()}
    for name, tensor in named_tensors(model).items():
        if name.startswith(MTP_PREFIX):
            continue
        spec = specs.pop(name)
        stored = reader.read_matrix(spec.name) if spec.role.is_matrix else reader.read(name)
        tensor.copy_(stored.dequantize() if isinstance(stored, NvFp4Tensor) else stored)
    assert not specs, f"{directory}: expected a tensor of the small model for each of {sorted(specs)}"
    model.set_topk(verified.config.index_topk)
    return model.requires_grad_(False).to(device)


@dataclass(frozen=True)
class Texts:
    """Texts that a target has read.

    Attributes:
        ids: int64 [B, S]. starts: int64 [B], where the target's own answers begin.
        streams: [B, S, 4, d] behind each layer. logits: [B, S, vocabulary].
    """

    ids: Tensor
    starts: Tensor
    streams: list[Tensor]
    logits: Tensor

    def rows(self, rows: Tensor) -> Texts:
        """Some of the texts."""
        return Texts(self.ids[rows], self.starts[rows], [each[rows] for each in self.streams], self.logits[rows])


def texts(target: SmallModel, rng: random.Random, count: int, tokens: int) -> Texts:
    """Documents of which the last part is what the target answers greedily, as a server's answers are."""
    documents = [_document(rng, tokens) for _ in range(count)]
    device = target.decoder.lm_head.weight.device
    ids = torch.tensor([document.ids for document in documents], device=device)
    starts = torch.tensor([rng.randint(tokens // 3, tokens - 32) for _ in documents], device=device)
    return answered(target, ids, starts)


def _document(rng: random.Random, tokens: int) -> Document:
    if tokens >= MEASURED_TOKENS and rng.random() < 0.5:
        document = far_document(rng, MEASURED_TOKENS, MEASURED_KEYS, MEASURED_QUESTIONS)
        return Document(document.text.ljust(tokens, "-"), document.answers)
    return training_document(rng, tokens, rng.randint(2, min(48, tokens // GROUP // 2)))


@torch.no_grad()
def answered(target: SmallModel, ids: Tensor, starts: Tensor) -> Texts:
    """``ids`` [B, S] with every token from ``starts`` on replaced by the target's likeliest.

    A pass tells the first token of each text that is wrong. The tokens behind it are guessed to repeat the last group,
    so that a few passes do: the target repeats its question.
    """
    ids, places = ids.clone(), torch.arange(ids.shape[1], device=ids.device)
    for _ in range(ROUNDS):
        output = target(ids)
        likeliest = output.logits[:, :-1].argmax(-1)
        wrong = torch.nn.functional.pad((likeliest != ids[:, 1:]) & (places[1:] >= starts[:, None]), (1, 0))
        if not wrong.any():
            break
        first = torch.where(wrong.any(1), wrong.int().argmax(1), ids.shape[1])[:, None]
        right = torch.cat([ids[:, :1], likeliest], 1)
        ids = torch.where(places == first, right, ids)
        source = torch.where(places > first, first - GROUP + 1 + (places - first - 1) % GROUP, places)
        ids = ids.gather(1, source.clamp(max=ids.shape[1] - 1))
    else:
        output = target(ids)
    return Texts(ids, starts, output.streams, output.logits)
