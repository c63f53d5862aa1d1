"""Training: a curriculum of documents, the loss, and a loop that can stop and go on."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from small_model.network import ALL_ENTRIES, SIZES, SmallModel, raw_config
from small_model.task import Document, far_document, training_document, value_ids

LEARNING_RATE, FLOOR, WARM_UP_STEPS = 3e-3, 0.05, 20
"""AdamW's rate at its height, the share of it that is left at the end of the cosine, and the steps of its rise."""
BETAS, WEIGHT_DECAY, MAX_GRADIENT_NORM = (0.9, 0.95), 0.01, 1.0
TEXT_WEIGHT = 0.1
"""Weight of the loss on all other tokens; that on answers has 1. Most are noise or new facts."""
DRAFT_WEIGHT, DRAFT_EVERY = 0.1, 4
"""Weight of the MTP block's loss, and every how many steps it is computed."""
INDEX_WEIGHT = 1.0
LOG_EVERY = 10
BALANCE_RATE = 1e-3
"""How much the routing bias of an expert moves a step, against its load."""


@dataclass(frozen=True)
class Phase:
    """A stretch of the curriculum.

    Attributes:
        share: of all steps. batch, tokens, keys: documents of a step, tokens of each, keys in it at most.
        window: the sliding window: a short one leaves recall to compressed entries from the beginning.
        sparse: entries are selected by the indexer; before that all are attended to, and the indexer learns from it.
    """

    share: float
    batch: int
    tokens: int
    keys: int
    window: int
    sparse: bool = False


PHASES = (
    Phase(0.10, batch=16, tokens=32, keys=2, window=2),
    Phase(0.15, batch=12, tokens=64, keys=4, window=2),
    Phase(0.20, batch=8, tokens=96, keys=8, window=4),
    Phase(0.20, batch=5, tokens=192, keys=16, window=16),
    Phase(0.15, batch=3, tokens=320, keys=32, window=128),
    Phase(0.20, batch=2, tokens=512, keys=48, window=128, sparse=True),
)


def phase_of(step: int, steps: int) -> Phase:
    """The curriculum's phase at ``step`` of ``steps``."""
    passed = 0.0
    for phase in PHASES:
        passed += phase.share
        if step < round(passed * steps):
            return phase
    return PHASES[-1]


def rate_of(step: int, steps: int) -> float:
    """The learning rate at ``step`` of ``steps``: a rise, then a cosine down to :data:`FLOOR` of its height."""
    rise = min(1.0, (step + 1) / WARM_UP_STEPS)
    return LEARNING_RATE * rise * (FLOOR + (1 - FLOOR) * 0.5 * (1 + math.cos(math.pi * step / steps)))


def documents(phase: Phase, seed: int, step: int) -> list[Document]:
    """The documents of a step: a function of seed and step alone, so that a resumed run sees the same ones.

    In the last phase one of four has its questions far from the facts.
    """
    rng = random.Random(f"{seed}:{step}")
    found = [training_document(rng, phase.tokens, rng.randint(2, phase.keys)) for _ in range(phase.batch)]
    if phase.sparse:
        found[0] = far_document(rng, phase.tokens, phase.keys, phase.keys // 2)
    return found


@dataclass
class Losses:
    """Means over a step's tokens, in nats; ``right`` is the share of answers that are the likeliest value."""

    answer: Tensor
    text: Tensor
    index: Tensor
    draft: Tensor
    right: float

    def total(self) -> Tensor:
        return self.answer + TEXT_WEIGHT * self.text + INDEX_WEIGHT * self.index + DRAFT_WEIGHT * self.draft


def losses(model: SmallModel, batch: list[Document], *, window: int, draft: bool) -> Losses:
    """Run the model on documents of one length; returns what is to be made small."""
    ids = torch.tensor([document.ids for document in batch])
    output = model(ids, draft=draft, window=window)
    cross = functional.cross_entropy(output.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    cross = cross.view(ids.shape[0], -1)
    is_answer = torch.zeros_like(cross, dtype=torch.bool)
    for row, document in enumerate(batch):
        is_answer[row, torch.tensor(document.answers, dtype=torch.long) - 1] = True
    values = torch.tensor(value_ids())
    guesses = values[output.logits[:, :-1, values].argmax(-1)]
    right = (guesses == ids[:, 1:])[is_answer].float().mean().item()
    drafted = cross.new_zeros(())
    if output.draft is not None:
        # The MTP block has a window and no entries: it learns the grammar, and cannot know far answers.
        drafted = functional.cross_entropy(output.draft[:, :-1].flatten(0, 1), ids[:, 2:].flatten())
    index = torch.stack([index_loss(scores, attended) for scores, attended in output.index]).mean()
    return Losses(cross[is_answer].mean(), cross[~is_answer].mean(), index, drafted, right)


def index_loss(scores: Tensor, attended: Tensor) -> Tensor:
    """KL divergence of the indexer's softmax from what the queries attended to, over the entries that they saw.

    Args:
        scores: of the indexer, fp32 [B, S, entries]. attended: weights of the entries, same shape, without gradient.
    """
    seen = attended > 0
    target = attended / attended.sum(-1, keepdim=True).clamp_min(1e-9)
    log_target = target.clamp_min(1e-9).log()
    guess = scores.masked_fill(~seen, -1e9).log_softmax(-1)
    return (target * (log_target - guess)).masked_fill(~seen, 0.0).sum(-1).mean()


@torch.no_grad()
def balance(layers: Iterable[Any]) -> None:
    """Move the bias of each expert against its load: it enters the choice of experts alone."""
    for layer in layers:
        chosen = layer.mlp.gate.chosen.float()
        layer.mlp.gate.e_score_correction_bias += BALANCE_RATE * torch.sign(chosen.mean() - chosen)


@dataclass
class Progress:
    """The record of a step, for the log."""

    step: int
    tokens: int
    losses: Losses
    gradient_norm: float


class Training:
    """A run: model, optimizer, and the number of steps done."""

    def __init__(self, seed: int, steps: int):
        self.seed, self.steps, self.done = seed, steps, 0
        self.model = SmallModel(raw_config(), seed)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), betas=BETAS, weight_decay=WEIGHT_DECAY)

    def run(self, until: int | None = None) -> Iterator[Progress]:
        """Go on to the end, or until so many steps are done."""
        while self.done < min(self.steps, until or self.steps):
            yield self._step()

    def _step(self) -> Progress:
        phase = phase_of(self.done, self.steps)
        batch = documents(phase, self.seed, self.done)
        self.model.set_topk(SIZES["index_topk"] if phase.sparse else ALL_ENTRIES)
        for group in self.optimizer.param_groups:
            group["lr"] = rate_of(self.done, self.steps)
        found = losses(self.model, batch, window=phase.window, draft=self.done % DRAFT_EVERY == 0)
        self.optimizer.zero_grad()
        found.total().backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), MAX_GRADIENT_NORM)
        if not torch.isfinite(norm):
            raise RuntimeError(f"step {self.done}: expected a finite gradient, found {norm}; lower LEARNING_RATE")
        self.optimizer.step()
        balance(self.model.routed_layers())
        self.done += 1
        return Progress(self.done, sum(len(document.text) for document in batch), found, norm.item())

    def save(self, file: Path) -> None:
        """Write everything that :meth:`resume` needs."""
        state = {
            "seed": self.seed,
            "steps": self.steps,
            "done": self.done,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
        }
        partial = file.with_name(f"{file.name}.partial")
        torch.save(state, partial)
        partial.replace(file)

    @classmethod
    def resume(cls, file: Path, seed: int, steps: int) -> Training:
        """Go on from what :meth:`save` wrote; ValueError if that was another run."""
        state: dict[str, Any] = torch.load(file, weights_only=True)
        for name, expected in (("seed", seed), ("steps", steps)):
            if state[name] != expected:
                raise ValueError(
                    f"{file}: expected a run with --{name} {expected}, found {state[name]}; use another --output"
                )
        run = cls(seed, steps)
        run.model.load_state_dict(state["model"])
        run.optimizer.load_state_dict(state["optimizer"])
        run.done = state["done"]
        return run


def train(run: Training, state: Path, *, until: int | None = None, save_every: int = 100) -> None:
    """Run to the end, or until so many steps are done.

    Prints a line every :data:`LOG_EVERY` steps and keeps the run's state in ``state``.
    """
    started, tokens, right = time.monotonic(), 0, 0.0
    last = min(run.steps, until or run.steps)
    for progress in run.run(last):
        tokens += progress.tokens
        right += progress.losses.right / LOG_EVERY
        if progress.step % LOG_EVERY == 0 or progress.step == last:
            phase, found = phase_of(progress.step - 1, run.steps), progress.losses
            print(
                f"step {progress.step:5} of {run.steps}  {phase.tokens:4} tokens, {phase.keys:2} keys"
                f"  answers {found.answer.item():.3f} ({right:.0%} right)  text {found.text.item():.3f}"
                f"  index {found.index.item():.3f}  gradient {progress.gradient_norm:.2f}"
                f"  {time.monotonic() - started:.0f} s, {tokens / (time.monotonic() - started):.0f} tokens/s",
                flush=True,
            )
            right = 0.0
        if progress.step % save_every == 0 or progress.step == last:
            run.save(state)
