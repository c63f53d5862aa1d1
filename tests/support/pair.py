"""What a server of several ranks must do, wherever they are: on GPUs, or in processes on a CPU.

A server of one rank answers the same prompts, read in one piece, where that of several reads the longest in chunks.
"""

from __future__ import annotations

import threading
import urllib.error
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path

import torch

from nvfp4_sgl.weights.parallel import SEQUENCE_PARALLEL_TOKENS
from tests.support.bf16_logprobs import prompt
from tests.support.scored import Scored, Yardstick, differences, is_within
from tests.support.server import Server, wait_for_none
from tests.support.server_processes import process
from tests.support.updates import until

FAULTS = Path(__file__).parent / "planted_faults"
CHUNK = SEQUENCE_PARALLEL_TOKENS
"""Whole chunks are divided over the ranks, others are not."""
LENGTHS = (5, 129, 700, 2500)
"""Tokens of each prompt; the last prompt is two chunks."""
CAPACITY = 3072
PROMPTS = [prompt(length, seed=40) for length in LENGTHS]
SHARED, LENGTH = 768, 900
"""Three pages that are cached, and a prompt that begins with them."""
LEAST_DECODED = 20
"""Tokens of all answers, at least, that both servers gave: a difference below rounding may choose another token."""
RUNNING_TOKENS = 4000
"""Of an answer that is not finished when a rank is killed."""


@dataclass(frozen=True)
class Place:
    """Where servers run.

    Attributes:
        flags: of all servers. one: environment of a server of one rank.
        death_seconds: in which a server must have ended of which a rank was killed.
        ranks: of the servers that have several.
    """

    flags: tuple[str, ...]
    one: Mapping[str, str] = field(default_factory=dict)
    death_seconds: float = 60
    ranks: int = 2

    @property
    def split(self) -> tuple[str, ...]:
        """Flags of servers of several ranks."""
        return "--tp-size", str(self.ranks), "--chunked-prefill-size", str(CHUNK)


class Servers:
    """The servers, started in pairs: the second pair when the first has filled the caches of compiled kernels."""

    def __init__(self, place: Place, checkpoint: Path, folder: Path, stack: ExitStack):
        self._place, self._checkpoint, self._folder, self._stack = place, checkpoint, folder, stack
        self._launched: dict[str, Server] = {}

    def _launch(self, name: str, *flags: str, environment: Mapping[str, str] | None = None) -> None:
        if name not in self._launched:
            log = self._folder / f"{name}.log"
            server = Server.launch(self._checkpoint, *self._place.flags, *flags, log=log, environment=environment or {})
            self._launched[name] = self._stack.enter_context(server)

    def _first(self) -> None:
        self._launch("one", "--chunked-prefill-size", str(CAPACITY), environment=self._place.one)
        self._launch("several", *self._place.split)

    def _second(self) -> None:
        if "eager" in self._launched:
            return
        self.several.wait_ready()
        fault = {"PYTHONPATH": str(FAULTS), "PLANTED_FAULT": "share"}
        flags = (*self._place.split, "--disable-cuda-graph")
        self._launch("eager", *flags)
        self._launch("broken", *flags, environment=fault)

    @property
    def one(self) -> Server:
        self._first()
        return self._launched["one"].wait_ready()

    @property
    def several(self) -> Server:
        self._first()
        return self._launched["several"].wait_ready()

    @property
    def eager(self) -> Server:
        """Several ranks without CUDA graphs."""
        self._second()
        return self._launched["eager"].wait_ready()

    @property
    def broken(self) -> Server:
        """Several ranks without CUDA graphs, of which the second adds nothing to the experts of one layer."""
        self._second()
        return self._launched["broken"].wait_ready()


@contextmanager
def servers(place: Place, checkpoint: Path, folder: Path) -> Iterator[Servers]:
    with ExitStack() as stack:
        found = Servers(place, checkpoint, folder, stack)
        found._first()
        yield found


def scores(server: Server) -> list[Scored]:
    """Of :data:`PROMPTS`, one after the other, nothing of them cached."""
    server.command("/flush_cache?timeout=30", {})
    found = [Scored.ask(server, ids) for ids in PROMPTS]
    assert not any(scored.cached for scored in found)
    return found


def check_agreement(one: list[Scored], several: list[Scored], yardstick: Yardstick) -> None:
    """Several ranks and one, prompts and answers apart."""
    bounds = yardstick.bounds()
    answers = [
        scored.differences(other)[length - 1 :] for scored, other, length in zip(several, one, LENGTHS, strict=True)
    ]
    decoded = torch.cat(answers)
    print("tokens that both answered:", [len(values) for values in answers])
    assert is_within(differences(several, one), bounds, "several ranks and one, all tokens")
    assert len(decoded) >= LEAST_DECODED
    # Few values scatter: twice the bound, of which a broken share exceeds ten times.
    assert is_within(decoded, 2 * bounds, "several ranks and one, answers")


def check_broken_share_is_seen(one: list[Scored], broken: list[Scored], yardstick: Yardstick) -> None:
    """The bound of :func:`check_agreement` is narrow enough to see it."""
    found, bounds = differences(broken, one), yardstick.bounds()
    assert not is_within(found, bounds, "a broken share")
    assert float(found.median()) > float(bounds[0])


def check_prefix(server: Server, yardstick: Yardstick) -> None:
    """Behind cached pages log-probabilities are those of the prompt in one piece, and depend on what is cached."""
    bounds = yardstick.bounds()
    ids = prompt(LENGTH, seed=41)
    whole = Scored.ask(server, ids)
    again = Scored.ask(server, ids, start=SHARED + 8)
    assert (whole.cached, again.cached) == (0, SHARED)
    found = whole.differences(again)
    assert len(found) > LENGTH - SHARED - 16
    assert is_within(found, bounds, "behind a cached prefix")
    changed = [*prompt(SHARED, seed=42), *ids[SHARED:]]
    assert Scored.ask(server, changed, start=0).cached == 0
    other = Scored.ask(server, changed, start=SHARED + 8)
    assert other.cached == SHARED
    count = LENGTH - SHARED - 10
    control = (other.values[:count] - again.values[:count]).abs()
    assert not is_within(control, bounds, "behind another prefix")


def check_death(server: Server, rank: int, seconds: float, *, running: bool) -> None:
    """A rank is killed, idle or while it decodes: the server says so and ends, and so do all its processes."""
    thread = threading.Thread(target=_answer, args=(server,), daemon=True)
    if running:
        thread.start()
        until(lambda: server.info()["pools"]["requests"]["used"] > 0)
        assert thread.is_alive(), "the request is too short to see anything"
    process(server, f"sglang::scheduler_TP{rank}").kill()
    assert server.process.wait(seconds) != 0
    assert not wait_for_none(server.process.pid, seconds)
    said = f"process scheduler_{rank} (tensor-parallel rank {rank}) has ended with SIGKILL"
    assert said in server.text(), server.text()[-2000:]
    if running:
        thread.join(seconds)
        assert not thread.is_alive(), "a client still waits"


def _answer(server: Server) -> None:
    try:
        server.generate([30, 31, 32], RUNNING_TOKENS)
    except (OSError, HTTPException, urllib.error.URLError, ValueError):
        return  # it ends with the server
