"""Records of a checkpoint that runs here, with no server: by itself, or fed the tokens of another record."""

from __future__ import annotations

from pathlib import Path

import torch

from nvfp4_sgl.checkpoint.verified import Verified, verify
from nvfp4_sgl.config import ModelConfig
from nvfp4_sgl.errors import ConfigError
from nvfp4_sgl.ops.modes import ActivationMode
from nvfp4_sgl.standalone import Standalone
from nvfp4_sgl.targets.target import descriptor
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
    directory: Path, file: Path, target: str, mode: ActivationMode, *, prompt: int, steps: int, seed: int
) -> None:
    """Record a prompt of random tokens and ``steps`` decode steps, each fed the likeliest token.

    Raises:
        ConfigError: more tokens than the model has positions.
    """
    verified = verify(directory)
    longest = verified.config.max_position_embeddings
    if prompt + steps > longest:
        raise ConfigError(
            f"--prompt {prompt} --steps {steps}: expected at most {longest} tokens together, the"
            f" max_position_embeddings of {directory}, found {prompt + steps}; pass fewer"
        )
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(verified.config.vocab_size, (prompt,), generator=generator).tolist()
    run, start = Run(verified, file, target, mode, prompt + steps, steps + 1), 0
    for _ in range(steps + 1):
        following = run.feed(ids, start)
        start, ids = start + len(ids), [following]


@torch.no_grad()
def run_forced(directory: Path, file: Path, target: str, mode: ActivationMode, given: Record) -> None:
    """Record the passes of the record ``given``: each is fed the tokens that were fed there, whatever is chosen here.

    Raises:
        ConfigError: there is none, or one that :func:`check_fed` refuses.
    """
    verified = verify(directory)
    check_fed(given, directory, verified.config)
    longest = max(each.positions[-1] for each in given.passes) + 1
    run = Run(verified, file, target, mode, longest, len(given.passes))
    for each in given.passes:
        run.feed(each.ids, each.positions[0])


def check_fed(given: Record, directory: Path, config: ModelConfig) -> None:
    """Refuse, before weights are loaded, what a checkpoint cannot be fed.

    Raises:
        ConfigError: no pass; one of several requests, or one that goes on from a prefix that is in no record; ids or
            positions that the model does not have.
    """
    if not given.passes:
        raise ConfigError(f"{given.file}: expected at least a pass, found none")
    end = 0
    for number, each in enumerate(given.passes):
        where = f"{given.file}: line {each.line}"
        if not each.is_one_sequence:
            raise ConfigError(f"{where}: pass {number} is of several requests; record them one at a time")
        start = each.positions[0]
        if start not in (0, end):
            raise ConfigError(
                f"{where}, field 'positions': expected a pass that begins at 0 or goes on at {end}, found one at"
                f" {start}: a cached prefix is in no record; start the server with --disable-radix-cache and record"
                " again"
            )
        end = start + len(each.ids)
        if end > config.max_position_embeddings:
            raise ConfigError(
                f"{where}, field 'positions': expected positions below {config.max_position_embeddings}, the"
                f" max_position_embeddings of {directory}, found {end - 1}; name the checkpoint that was recorded"
            )
        if max(each.ids) >= config.vocab_size:
            raise ConfigError(
                f"{where}, field 'ids': expected token ids below {config.vocab_size}, the vocab_size of {directory},"
                f" found {max(each.ids)}; name the checkpoint that was recorded"
            )
