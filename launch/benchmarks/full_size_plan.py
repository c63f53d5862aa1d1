"""The plan of a run of ``launch/bench_full``: the starts of servers in their order, with their flags and measurements.

What matters most comes first, so that a run that is cut off keeps it: each server at few requests, then each at the
others. Made without a GPU; ``--dry-run`` prints it.
"""

from __future__ import annotations

import argparse
import itertools
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.released import MODELS, DraftWeights, Released
from nvfp4_sgl.synthetic.tiny_config import DSPARK_FIELDS, TinyDraft, TinyFormat

STOCK = Path(__file__).parent / "peers" / "stock_sglang"
FLAGS = "--load-format dummy --sampling-backend pytorch --context-length 16384"
LEAST_REQUESTS = 64
"""Requests that a server is laid out for, at least."""
ENGINES = {"ours": TinyFormat.NVFP4_FULL, "stock": TinyFormat.DEEPSEEK}
STOCK_FLAGS = ["--moe-runner-backend", "marlin", "--trust-remote-code"]
STOCK_ENVIRONMENT = {"NVFP4_SGL_DISABLE": "1", "SGLANG_JIT_DEEPGEMM_PRECOMPILE": "0"}
LONG_PROMPT = 8192
LONG_ANSWER = 4
TRACED_TOKENS = 400
"""Tokens of a request whose decode steps are traced."""
ADMIN_KEY = "bench-full"
"""Key of the servers that are measured: SGLang's profiler is an administrative endpoint."""
OF_A_START = ("ready after", "start", "plugin", "host memory", "GPU memory")
"""What is known of a server once it is ready; ``start`` and ``plugin`` are this project's alone."""
FAILED = "failed"
"""Under which the report keeps the error that ended a start; no measurement."""


@dataclass(frozen=True)
class Start:
    """A start of a server, and what is measured there.

    Attributes:
        engine: of :data:`ENGINES`. concurrency, trace: requests at once, of measurements and of traced steps.
        long: whether a long prompt is timed. drafts: whether rounds are.
    """

    engine: str
    concurrency: tuple[int, ...]
    trace: tuple[int, ...] = ()
    long: bool = False
    drafts: bool = False

    @property
    def most(self) -> int:
        """Requests that the server is laid out for."""
        return max([LEAST_REQUESTS, *self.concurrency, *self.trace])

    def at(self, count: int) -> tuple[str, ...]:
        """Names of what the client finds with so many requests at once."""
        return (f"at {count}", *([f"round at {count}"] if self.drafts else []), f"steady at {count}")

    @property
    def names(self) -> list[str]:
        """Names of all measurements, in their order."""
        found = [name for name in OF_A_START if self.engine == "ours" or name != "start"]
        for count in self.concurrency:
            found += self.at(count)
        found += [f"trace at {count}" for count in self.trace]
        return found + ([f"prompt of {LONG_PROMPT}"] if self.long else [])

    def left(self, found: Collection[str]) -> list[str]:
        """Names that are not among ``found``."""
        return [name for name in self.names if name not in found]


def starts(arguments: argparse.Namespace) -> list[Start]:
    """All starts: of each server at ``--concurrency``, then of each at ``--later``.

    Steps are traced by the start that measures as many requests, else by the last, which has the long prompt, too.
    """
    rounds = [tuple(dict.fromkeys(counts)) for counts in (arguments.concurrency, arguments.later) if counts]
    last = len(rounds) - 1
    traced: list[list[int]] = [[] for _ in rounds]
    for count in dict.fromkeys(arguments.trace):
        traced[next((place for place, counts in enumerate(rounds) if count in counts), last)].append(count)
    return [
        Start(
            engine,
            counts,
            trace=tuple(traced[place]),
            long=arguments.long and place == last,
            drafts=bool(arguments.drafts),
        )
        for place, counts in enumerate(rounds)
        for engine in arguments.servers
    ]


def pending(arguments: argparse.Namespace, found: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[Start, list[str]]]:
    """The starts that are needed yet, each with the names that it has to find; by what has been found when asked."""
    for start in starts(arguments):
        if left := start.left(found.get(start.engine, {})):
            yield start, left


def server_flags(arguments: argparse.Namespace, start: Start) -> tuple[list[str], dict[str, str]]:
    """Flags and environment of a server, of which for a flag that comes twice the last one counts."""
    flags = common_flags([start.most], radix_cache=arguments.radix_cache, fraction=model_of(arguments).fraction)
    flags += ["--tp", str(arguments.tp), "--admin-api-key", ADMIN_KEY, *arguments.flags.split()]
    values = {"SGLANG_SIMULATE_UNIFORM_EXPERTS": "1", "HF_HUB_OFFLINE": "1"}
    if start.engine == "stock":
        flags += [*STOCK_FLAGS, "--sampling-backend", arguments.stock_sampler]
        paths = [str(STOCK), *filter(None, [os.environ.get("PYTHONPATH")])]
        values |= STOCK_ENVIRONMENT | {"PYTHONPATH": os.pathsep.join(paths)}
        if arguments.stock_cache is not None:
            values["SGLANG_CACHE_DIR"] = str(arguments.stock_cache.resolve())
    more, variables = drafting(arguments)
    return flags + more, values | variables


def given_flags(flags: list[str]) -> dict[str, str]:
    """Values of a server's flags; of one that comes twice the last, of one without a value the empty string."""
    found = {}
    for flag, following in itertools.pairwise([*flags, ""]):
        name, has_value, value = flag.partition("=")
        if name.startswith("--"):
            found[name] = value if has_value else "" if following.startswith("--") else following
    return found


def common_flags(at_once: Iterable[int], *, radix_cache: bool, fraction: float = MODELS["flash"].fraction) -> list[str]:
    """Flags of all servers, laid out for as many requests as will be ``at_once``; ``fraction`` of a GPU is theirs."""
    most = str(max([LEAST_REQUESTS, *at_once]))
    flags = [*FLAGS.split(), "--mem-fraction-static", str(fraction)]
    flags += ["--cuda-graph-max-bs-decode", most, "--max-running-requests", most]
    return flags if radix_cache else [*flags, "--disable-radix-cache"]


def drafting(arguments: argparse.Namespace) -> tuple[list[str], dict[str, str]]:
    """Flags and environment of a server that drafts, of either engine; none of one that does not.

    Guesses of random weights mean nothing, so that SGLang's switch says how many are accepted. With one row of a round
    accepted, which is the default, the time per output token is that of a round.
    """
    if not arguments.drafts:
        return [], {}
    steps = arguments.steps
    flags = ["--speculative-algorithm", "DSPARK"]
    if draft_of(arguments) is TinyDraft.MTP:
        flags = ["--speculative-algorithm", "EAGLE", "--speculative-num-steps", str(steps)]
        flags += ["--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", str(steps + 1)]
    accepted = {
        "SGLANG_SIMULATE_ACC_LEN": str(arguments.accepted),
        "SGLANG_SIMULATE_ACC_TOKEN_MODE": "real-draft-token",
    }
    return flags, accepted


def draft_of(arguments: argparse.Namespace) -> TinyDraft:
    """The draft that a run's checkpoint bundles: its MTP block without ``--drafts``, as the releases have it."""
    return TinyDraft(arguments.drafts or TinyDraft.MTP.value)


def draft_weights_of(arguments: argparse.Namespace) -> DraftWeights:
    """Storages of ours' draft: NVFP4 unless ``--draft-weights`` says another."""
    return DraftWeights(arguments.draft_weights or DraftWeights.NVFP4)


def rows_of_a_round(arguments: argparse.Namespace) -> int:
    """Rows that a drafted round verifies: its guesses and one."""
    guesses = arguments.steps if draft_of(arguments) is TinyDraft.MTP else DSPARK_FIELDS["dspark_block_size"]
    return int(guesses) + 1


def model_of(arguments: argparse.Namespace) -> Released:
    """The model of a run."""
    return MODELS[arguments.model]
