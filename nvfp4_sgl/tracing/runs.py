"""Records of a checkpoint that runs here, with no server: by itself, or fed the tokens of another record."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from nvfp4_sgl.checkpoint.verified import Verified, verify
from nvfp4_sgl.ops.modes import ActivationMode
from nvfp4_sgl.standalone import Standalone
from nvfp4_sgl.targets.target import descriptor
from nvfp4_sgl.tracing.fed import check_drawn, check_fed
from nvfp4_sgl.tracing.reading import Record
from nvfp4_sgl.tracing.record import Recorder


class Run:
    """A checkpoint on a target in a mode, of which a record is written.

    Args:
        capacity: tokens of the longest sequence. count: of the passes.
    """

    def __init__(self, model: Verified, file: Path, target: str, mode: ActivationMode, capacity: int, count: int):
        device = torch.device("cuda", torch.cuda.current_device()) if descriptor(target).on_gpu else "cpu"
        self._model = Standalone(model, target=target, device=device, mode=mode, requests=1, capacity=capacity)
        about = {"target": target, "mode": mode.value, "rank": 0, "ranks": 1}
        self._recorder = Recorder(self._model.decoder, file, count, about)

    def feed(self, ids: list[int], start: int) -> int:
        """Run one pass of the sequence, from position ``start``; 0 begins another. Returns the likeliest next token."""
        if start == 0:
            self._model.reset()
        work = self._model.begin({0: ids})
        with self._recorder.recording(work.ids, work.request.positions) as more:
            more["chose"] = int(self._model.forward(work)[-1].argmax())
        return int(more["chose"])


@torch.no_grad()
def run_greedy(
    directory: Path,
    file: Path,
    target: str,
    mode: ActivationMode,
    *,
    prompt: int,
    steps: int,
    seed: int,
    say: Callable[[str], None] = lambda _: None,
) -> None:
    """Record a prompt of random tokens and ``steps`` decode steps, each fed the likeliest token.

    Args:
        say: takes what is begun, a line each.

    Raises:
        ConfigError: more tokens than the model has positions.
    """
    verified = verify(directory)
    check_drawn(prompt, steps, directory, verified.config)
    say("loading A")
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(verified.config.vocab_size, (prompt,), generator=generator).tolist()
    run, start = Run(verified, file, target, mode, prompt + steps, steps + 1), 0
    for number in range(steps + 1):
        say(f"A, pass {number} of {steps + 1}: {len(ids)} tokens")
        following = run.feed(ids, start)
        start, ids = start + len(ids), [following]


@torch.no_grad()
def run_forced(
    directory: Path,
    file: Path,
    target: str,
    mode: ActivationMode,
    given: Record,
    say: Callable[[str], None] = lambda _: None,
) -> None:
    """Record the passes of the record ``given``: each is fed the tokens that were fed there, whatever is chosen here.

    Args:
        say: takes what is begun, a line each.

    Raises:
        ConfigError: there is none, or one that :func:`check_fed` refuses.
    """
    verified = verify(directory)
    check_fed(given, directory, verified.config)
    say("loading B")
    longest = max(each.positions[-1] for each in given.passes) + 1
    run = Run(verified, file, target, mode, longest, len(given.passes))
    for number, each in enumerate(given.passes):
        say(f"B, pass {number} of {len(given.passes)}: {len(each.ids)} tokens")
        run.feed(each.ids, each.positions[0])
