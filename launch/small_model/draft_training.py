"""Training of drafts behind a frozen target: losses on texts that the target has written, and a loop that can stop."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional

from nvfp4_sgl.checkpoint.drafts import DraftKind
from small_model.drafts import BLOCK, NOISE_TOKEN, STEPS, Drafted, Drafts, quantised
from small_model.export import save_drafts
from small_model.network import SmallModel
from small_model.target import Texts, texts
from small_model.training import BETAS, MAX_GRADIENT_NORM, WEIGHT_DECAY, balance

LEARNING_RATE, FLOOR, WARM_UP = 2e-3, 0.02, 0.02
"""AdamW's rate at its height, the share that is left at the end of the cosine, and the share of the run it rises in."""
PASSES = 2
"""How often each text is trained on; writing it costs more."""
DECAY = 0.85
"""Weight of a guess over that of the one before it: it counts only if that one was right."""
SHARP = 0.5
"""Share of the target's likeliest token in what guesses are to be; the rest is its distribution."""
CONFIDENCE_WEIGHT = 0.1


@dataclass(frozen=True)
class Sizes:
    """Texts that are written at once, those of a step, tokens of each, and blocks that DSpark drafts in each."""

    written: int
    batch: int
    tokens: int
    anchors: int

    @property
    def steps(self) -> int:
        """Steps with the texts that are written at once."""
        return PASSES * self.written // self.batch


SIZES = {"cpu": Sizes(8, 4, 256, 12), "cuda": Sizes(256, 64, 576, 48)}
"""By the device's type; a window is 128 tokens."""


@dataclass
class Progress:
    """Losses and right guesses of a step.

    Attributes:
        mtp, dspark: losses in nats. chain, block: shares of right guesses by place, behind right ones alone, where the
            target answers itself.
    """

    step: int
    mtp: float
    dspark: float
    chain: list[float]
    block: list[float]


def draw_anchors(rng: random.Random, starts: list[int], tokens: int, count: int) -> Tensor:
    """int64 [B, count], the last position that each block sees: half of them in the target's own answers."""
    last = tokens - BLOCK - 3
    rows = [
        [rng.randint(start - 1 if half % 2 and start - 1 < last else 0, last) for half in range(count)]
        for start in starts
    ]
    return torch.tensor(rows)


def wanted(logits: Tensor) -> Tensor:
    """Targets of the guesses: the target's distribution, its likeliest token above it."""
    likeliest = functional.one_hot(logits.argmax(-1), logits.shape[-1])
    return SHARP * likeliest + (1 - SHARP) * logits.softmax(-1)


def rightness(right: Tensor, counted: Tensor) -> list[float]:
    """Shares of right guesses by place, behind right ones alone; ``right`` bool [..., places], ``counted`` [...]."""
    before = functional.pad(right.long().cumprod(-1)[..., :-1], (1, 0), value=1).bool() & counted[..., None]
    found: list[float] = ((right & before).flatten(0, -2).sum(0) / before.flatten(0, -2).sum(0).clamp(min=1)).tolist()
    return found


@dataclass
class Losses:
    """``mtp``, ``dspark`` and ``confidence`` in nats; guesses that are right, bool [B, R, STEPS] and [B, A, BLOCK]."""

    mtp: Tensor
    dspark: Tensor
    confidence: Tensor
    chain_right: Tensor
    block_right: Tensor


def losses(drafted: Drafted, weights: dict[str, Tensor], batch: Texts, head: Any, at: Tensor) -> Losses:
    """Cross entropy of every guess with what the target says at its place.

    Args:
        weights: the parameters that drafted. head: the target's LM head. at: anchors [B, A].
    """
    target, mtp, chain_right = wanted(batch.logits), torch.zeros((), device=at.device), []
    total = sum(DECAY**place for place in range(STEPS))
    for step, hidden in enumerate(drafted.chain):
        logits, goal = head(hidden), target[:, 1 + step : 1 + step + hidden.shape[1]]
        chain_right.append(logits.argmax(-1) == goal.argmax(-1))
        mtp = mtp + DECAY**step / total * functional.cross_entropy(logits.flatten(0, 1), goal.flatten(0, 1))
    places = (at[..., None] + 1 + torch.arange(BLOCK, device=at.device)).flatten(1)  # of the token before each guess
    before = batch.ids.gather(1, places).view(*at.shape, BLOCK)
    latent = weights["dspark.markov_w1"][before]
    logits = head(drafted.block) + latent @ weights["dspark.markov_w2"].t()
    goal = target.gather(1, places[..., None].expand(-1, -1, target.shape[-1])).view_as(logits)
    block_right = logits.argmax(-1) == goal.argmax(-1)
    decay = DECAY ** torch.arange(BLOCK, device=at.device)
    cross = functional.cross_entropy(logits.flatten(0, 2), goal.flatten(0, 2), reduction="none").view_as(before)
    certain = functional.linear(torch.cat([drafted.x, latent], -1).detach(), weights["dspark.confidence.weight"])
    confidence = functional.binary_cross_entropy_with_logits(certain[..., 0], block_right.float())
    dspark = (cross * decay).mean() / decay.mean()
    return Losses(mtp, dspark, confidence, torch.stack(chain_right, -1), block_right)


class DraftTraining:
    """A run: drafts, their optimizer, and how far it is.

    Args:
        steps: of the run. seconds: of all its parts; it then ends early, with the learning rate as at its end.
    """

    def __init__(self, target: SmallModel, raw: dict[str, Any], seed: int, steps: int, sizes: Sizes):
        self.target, self.raw, self.seed, self.steps, self.sizes = target, raw, seed, steps, sizes
        self.done, self.spent, self.seconds = 0, 0.0, math.inf
        self.head = target.decoder.lm_head
        self.drafts = Drafts(raw, seed).to(self.head.weight.device)
        self.optimizer = torch.optim.AdamW(self.drafts.parameters(), betas=BETAS, weight_decay=WEIGHT_DECAY)

    @property
    def passed(self) -> float:
        """The share of the run that is over."""
        return max(self.done / self.steps, self.spent / self.seconds)

    def run(self) -> Iterator[Progress]:
        """Go on to the end."""
        while self.passed < 1:
            started = time.monotonic()
            number = self.done // self.sizes.steps
            rng = random.Random(f"drafts:{self.seed}:{number}")
            written = texts(self.target, rng, self.sizes.written, self.sizes.tokens)
            self.spent += time.monotonic() - started
            order = [row for _ in range(PASSES) for row in rng.sample(range(self.sizes.written), self.sizes.written)]
            for first in range(0, len(order), self.sizes.batch):
                started = time.monotonic()
                rows = torch.tensor(order[first : first + self.sizes.batch], device=written.ids.device)
                yield self._step(written.rows(rows), rng)
                self.spent += time.monotonic() - started

    def _step(self, batch: Texts, rng: random.Random) -> Progress:
        at = draw_anchors(rng, batch.starts.tolist(), self.sizes.tokens, self.sizes.anchors).to(batch.ids.device)
        for group in self.optimizer.param_groups:
            group["lr"] = rate_of(self.passed)
        found = self.losses(batch, at, quantised(self.drafts))
        self.optimizer.zero_grad()
        (found.mtp + found.dspark + CONFIDENCE_WEIGHT * found.confidence).backward()
        for part in (self.drafts.mtp, self.drafts.dspark):
            norm = torch.nn.utils.clip_grad_norm_(part.parameters(), MAX_GRADIENT_NORM)
        if not torch.isfinite(norm):
            raise RuntimeError(f"step {self.done}: expected a finite gradient, found {norm}; lower LEARNING_RATE")
        self.optimizer.step()
        balance(self.drafts.layers())
        self.done += 1
        # Places where the token that is given to the draft is the target's own, too.
        own = torch.arange(found.chain_right.shape[1], device=at.device) + 1 >= batch.starts[:, None]
        chain, block = rightness(found.chain_right, own), rightness(found.block_right, at + 1 >= batch.starts[:, None])
        return Progress(self.done, found.mtp.item(), found.dspark.item(), chain, block)

    def losses(self, batch: Texts, at: Tensor, weights: dict[str, Tensor]) -> Losses:
        """The losses of drafts with these parameters."""
        table = self.target.decoder.model.embed_tokens.weight
        given = (batch.streams, table[batch.ids], table[NOISE_TOKEN], at)
        drafted: Drafted = functional_call(self.drafts, weights, given)
        return losses(drafted, weights, batch, self.head, at)

    def save(self, file: Path) -> None:
        """Write everything that :meth:`resume` needs."""
        state = {
            "seed": self.seed,
            "steps": self.steps,
            "done": self.done,
            "spent": self.spent,
            "drafts": self.drafts.state_dict(),
            "optimizer": self.optimizer.state_dict(),
        }
        partial = file.with_name(f"{file.name}.partial")
        torch.save(state, partial)
        partial.replace(file)

    def resume(self, file: Path) -> None:
        """Go on from what :meth:`save` wrote; ValueError if that was another run."""
        state: dict[str, Any] = torch.load(file, weights_only=True)
        for name, expected in (("seed", self.seed), ("steps", self.steps)):
            if state[name] != expected:
                raise ValueError(f"{file}: expected {name} {expected}, found {state[name]}; use another --output")
        self.drafts.load_state_dict(state["drafts"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.done, self.spent = state["done"], state["spent"]


def rate_of(passed: float) -> float:
    """The learning rate at a share of the run: a rise, then a cosine."""
    rise = min(1.0, passed / WARM_UP + 0.02)
    return LEARNING_RATE * rise * (FLOOR + (1 - FLOOR) * 0.5 * (1 + math.cos(math.pi * min(passed, 1.0))))


def tokens_a_round(shares: list[float]) -> float:
    """Tokens that a round gives, of the shares of right guesses by place, behind right ones alone."""
    accepted, found = 1.0, 1.0
    for share in shares:
        accepted *= share
        found += accepted
    return found


def train(run: DraftTraining, directory: Path, save_every: float = 60.0) -> dict[DraftKind, Path]:
    """Run to the end; prints a line whenever texts are used up, and keeps state and drafts in ``directory``.

    Returns:
        the files of the drafts.
    """
    raw, saved, means = run.raw, time.monotonic(), Means()
    files = save_drafts(run.drafts, raw, directory)
    for progress in run.run():
        means.add(progress)
        if run.done % run.sizes.steps == 0:
            print(f"{means.line()}  {run.spent:.0f} s, {run.done / max(run.spent, 1e-9):.2f} steps/s", flush=True)
            means = Means()
            if time.monotonic() - saved > save_every or run.passed >= 1:
                run.save(directory / "drafts.pt")
                files, saved = save_drafts(run.drafts, raw, directory), time.monotonic()
    return files


@dataclass
class Means:
    """Means over some steps, for the log."""

    steps: list[Progress] = field(default_factory=list)

    def add(self, progress: Progress) -> None:
        self.steps.append(progress)

    def line(self) -> str:
        chain, block = (
            [sum(place) / len(self.steps) for place in zip(*rows, strict=True)]
            for rows in ([step.chain for step in self.steps], [step.block for step in self.steps])
        )
        mtp, dspark = (sum(getattr(step, name) for step in self.steps) / len(self.steps) for name in ("mtp", "dspark"))
        words = [f"step {self.steps[-1].step:5}"]
        for name, loss, shares in (("MTP", mtp, chain), ("DSpark", dspark, block)):
            right = " ".join(f"{share:.2f}" for share in shares)
            words.append(f"{name} loss {loss:.3f}, right {right}, {tokens_a_round(shares):.2f} tokens a round")
        return "  ".join(words)
