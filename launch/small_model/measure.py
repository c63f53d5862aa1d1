"""Measures a checkpoint of the small model through our CPU reference decoder, the one that is served."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nvfp4_sgl.cache.plan import BatchPlan
from nvfp4_sgl.config import LayerKind
from nvfp4_sgl.standalone import Standalone
from nvfp4_sgl.targets.reference.attention import ReferenceAttentionCore
from small_model.task import MEASURED_KEYS, MEASURED_QUESTIONS, MEASURED_TOKENS, Document, far_document

Z = 1.96
"""Normal quantile of a 95 % interval."""


def far_documents(count: int, seed: int = 1_000_003) -> list[Document]:
    """Documents that no training run has seen: these draw from seeds of their own."""
    return [
        far_document(random.Random(f"far:{seed}:{i}"), MEASURED_TOKENS, MEASURED_KEYS, MEASURED_QUESTIONS)
        for i in range(count)
    ]


@dataclass(frozen=True)
class Mean:
    """A mean over documents with half of its 95 % interval."""

    value: float
    margin: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Mean:
        x = torch.tensor(values, dtype=torch.float64)
        return cls(x.mean().item(), Z * x.std().item() / len(values) ** 0.5 if len(values) > 1 else float("nan"))


@dataclass(frozen=True)
class Figures:
    """Results of one checkpoint on some documents.

    Attributes:
        loss: cross entropy of the answers, nats. accuracy: share of answers that are the likeliest token.
        kl: divergence of the next-token distributions from the reference's, nats a token, all tokens;
            answer_kl: the same where answers are predicted.
    """

    loss: Mean
    accuracy: Mean
    kl: Mean | None = None
    answer_kl: Mean | None = None


def log_probabilities(model: Standalone, documents: Sequence[Document]) -> list[Tensor]:
    """fp32 [T, vocab] of each document, each in one pass."""
    results = []
    for document in documents:
        model.reset()
        results.append(model.extend({0: document.ids})[0].log_softmax(-1))
    return results


def evaluate(
    checkpoint: Path, documents: Sequence[Document], reference: Sequence[Tensor] | None = None, **options: Any
) -> tuple[Figures, list[Tensor]]:
    """Figures of a checkpoint, and its log-probabilities.

    Args:
        reference: log-probabilities to compare with.
        options: of :class:`Standalone`.
    """
    longest = max(len(document.text) for document in documents)
    found = log_probabilities(Standalone(checkpoint, requests=1, capacity=longest, **options), documents)
    return figures(found, documents, reference), found


def figures(found: Sequence[Tensor], documents: Sequence[Document], reference: Sequence[Tensor] | None) -> Figures:
    """The figures of log-probabilities ``found``, one tensor a document."""
    losses, right, kls, answer_kls = [], [], [], []
    for number, (document, logprobs) in enumerate(zip(documents, found, strict=True)):
        places = torch.tensor(document.answers)
        answers = torch.tensor(document.ids)[places]
        at = logprobs[places - 1]
        losses.append(-at.gather(1, answers[:, None]).mean().item())
        right.append((at.argmax(-1) == answers).float().mean().item())
        if reference is not None:
            kl = (reference[number].exp() * (reference[number] - logprobs)).sum(-1)
            kls.append(kl.mean().item())
            answer_kls.append(kl[places - 1].mean().item())
    if reference is None:
        return Figures(Mean.of(losses), Mean.of(right))
    return Figures(Mean.of(losses), Mean.of(right), Mean.of(kls), Mean.of(answer_kls))


@contextmanager
def without_entries(*kinds: LayerKind) -> Iterator[None]:
    """Inside, layers of these kinds attend to no compressed entry of the CPU reference, only to their window."""
    forward = ReferenceAttentionCore.forward

    def cut(self: Any, q: Tensor, step: BatchPlan, cache: Any, entries: Tensor | None, form: Any) -> Any:
        if self._kind in kinds:
            step = replace(step, hca_slots=torch.full_like(step.hca_slots, -1))
            entries = None if entries is None else torch.full_like(entries, -1)
        return forward(self, q, step, cache, entries, form)

    ReferenceAttentionCore.forward = cut  # type: ignore[method-assign]
    try:
        yield
    finally:
        ReferenceAttentionCore.forward = forward  # type: ignore[method-assign]
