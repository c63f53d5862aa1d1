"""Records of a checkpoint that runs here, with no server: by itself, or fed the tokens of another record."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from nvfp4_sgl.checkpoint.verified import verify
from nvfp4_sgl.errors import ConfigError
from nvfp4_sgl.ops.modes import ActivationMode
from nvfp4_sgl.standalone import Standalone
from nvfp4_sgl.targets.choose import Target
from nvfp4_sgl.tracing.diff import is_one_sequence, passes
from nvfp4_sgl.tracing.record import Recorder


class Run:
    """A checkpoint on a target in a mode, of which a record is written.

    Args:
        capacity: tokens of the longest sequence. count: of the passes.
    """

    def __init__(self, directory: Path, file: Path, target: Target, mode: ActivationMode, capacity: int, count: int):
        device = torch.device("cuda", torch.cuda.current_device()) if target.on_gpu else "cpu"
        self._model = Standalone(directory, target=target, device=device, mode=mode, requests=1, capacity=capacity)
        about = {"target": target.value, "mode": mode.value, "rank": 0, "ranks": 1}
        self._recorder, self._length = Recorder(self._model.decoder, file, count, about), 0

    def feed(self, ids: list[int], start: int) -> int:
        """Run one pass of the sequence, from position ``start``; 0 begins another. Returns the likeliest next token."""
        if start == 0:
            self._model.reset()
        elif start != self._length:
            raise ConfigError(
                f"expected a pass that goes on at position {self._length}, found one at {start}: a cached prefix is in"
                " no record; start the server with --disable-radix-cache and record again"
            )
        work = self._model.begin({0: ids})
        with self._recorder.recording(work.ids, work.request.positions) as more:
            more["chose"] = int(self._model.forward(work)[-1].argmax())
        self._length = start + len(ids)
        return int(more["chose"])


@torch.no_grad()
def run_greedy(
    directory: Path, file: Path, target: Target, mode: ActivationMode, *, prompt: int, steps: int, seed: int
) -> None:
    """Record a prompt of random tokens and ``steps`` decode steps, each fed the likeliest token."""
    vocabulary = verify(directory).config.vocab_size
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(vocabulary, (prompt,), generator=generator).tolist()
    run, start = Run(directory, file, target, mode, prompt + steps, steps + 1), 0
    for _ in range(steps + 1):
        following = run.feed(ids, start)
        start, ids = start + len(ids), [following]


@torch.no_grad()
def run_forced(directory: Path, file: Path, target: Target, mode: ActivationMode, given: Path) -> None:
    """Record the passes of the record ``given``: each is fed the tokens that were fed there, whatever is chosen here.

    Raises:
        ConfigError: a pass of several requests, or one that goes on from a prefix that is in no record.
    """
    records: list[dict[str, Any]] = list(passes(given))
    for number, record in enumerate(records):
        if not is_one_sequence(record):
            raise ConfigError(f"{given}: pass {number} is of several requests; record them one at a time")
    if not records:
        raise ConfigError(f"{given}: expected at least a pass, found none")
    longest = max(record["positions"][-1] for record in records) + 1
    run = Run(directory, file, target, mode, longest, len(records))
    for record in records:
        run.feed(record["ids"], record["positions"][0])
