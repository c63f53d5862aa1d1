"""Options of ``launch/bench_full`` that contradict each other, the model or what ``--flags`` gives to servers.

They are refused before anything starts: a server of other ranks, layers or requests would be measured under the wrong
name, and one that refuses its flags says so minutes later, on a machine that waits for it.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping

from benchmarks.full_size_plan import (
    LONG_ANSWER,
    LONG_PROMPT,
    TRACED_TOKENS,
    Start,
    draft_weights_of,
    given_flags,
    model_of,
    rows_of_a_round,
    server_flags,
    starts,
)
from nvfp4_sgl import prompt_sizes, pushed_sums
from nvfp4_sgl.errors import ConfigError
from nvfp4_sgl.sglang_defaults import DRAFT_STEPS

OPTIONS = {
    **dict.fromkeys(("--tp", "--tp-size", "--tensor-parallel-size"), "--tp"),
    **dict.fromkeys(("--model", "--model-path", "--load-format"), "--model and --layers"),
    "--disable-radix-cache": "--radix-cache, without which there is none",
    "--sampling-backend": "--stock-sampler",
    "--port": "--port",
    "--admin-api-key": "the benchmark's own",
}
"""Flags of servers that ``--flags`` must not give, and what says so instead."""
SPECULATIVE = "--speculative-"
WHOLE_NUMBERS = ("--max-running-requests", "--context-length", "--chunked-prefill-size", "--max-total-tokens")
SHARE = "--mem-fraction-static"


def complete(arguments: argparse.Namespace) -> None:
    """Check options against each other, and :func:`fill_in` the rest.

    Raises:
        ValueError: options contradict each other; names each with what was expected.
    """
    found = [*_without_effect(arguments), *_of_environment(arguments)]
    fill_in(arguments)
    model, rows = model_of(arguments), rows_of_a_round(arguments)
    if arguments.drafts and not 1 <= arguments.accepted <= rows:
        found.append(
            f"--accepted {arguments.accepted:g}: expected 1 to {rows}, a round's verified tokens: its guesses and one"
        )
    if arguments.layers is not None and arguments.layers > model.layers:
        found.append(f"--layers {arguments.layers}: expected 1 to {model.layers}, those of {model.name}")
    if not (arguments.concurrency or arguments.later):
        found.append("--concurrency and --later: expected requests of one of them at least, found none")
    words = arguments.flags.split()
    if words and not words[0].startswith("--"):
        found.append(f"--flags: expected flags, which begin with --, found '{words[0]}'")
    found += _of_flags(given_flags(words))
    if not found:
        found = [wrong for start in starts(arguments) for wrong in _of_sizes(arguments, start)]
    if found:
        raise ValueError("\n  ".join(["options that do not fit each other:", *dict.fromkeys(found)]))


def fill_in(arguments: argparse.Namespace) -> None:
    """Give options of drafts that were not given their defaults, which the parser leaves out to tell them apart."""
    arguments.steps = DRAFT_STEPS if arguments.steps is None else arguments.steps
    arguments.accepted = 1.0 if arguments.accepted is None else arguments.accepted
    arguments.draft_weights = draft_weights_of(arguments).value


def _of_environment(arguments: argparse.Namespace) -> Iterator[str]:
    """Variables that ours would be refused for."""
    if "ours" not in arguments.servers:
        return
    sums = {"target": pushed_sums.TARGET, "ranks": arguments.tp, "custom_all_reduce": True, "traces": False}
    for check, given in ((prompt_sizes.check_asked, {"on_gpu": True}), (pushed_sums.check_asked, sums)):
        try:
            check(**given)
        except ConfigError as error:
            yield str(error)


def _without_effect(arguments: argparse.Namespace) -> Iterator[str]:
    """Options that would do nothing, or stop stock's server."""
    if arguments.stock_cache is not None and "stock" not in arguments.servers:
        yield f"--stock-cache {arguments.stock_cache}: expected stock among the servers; leave it out"
    if arguments.stock_cache is not None and arguments.stock_cache.is_file():
        yield f"--stock-cache {arguments.stock_cache}: expected a folder, found a file"
    if arguments.steps is not None and arguments.drafts != "mtp":
        yield f"--steps {arguments.steps}: expected --drafts mtp, too; leave it out, or draft so"
    if arguments.accepted is not None and arguments.drafts is None:
        yield f"--accepted {arguments.accepted:g}: expected --drafts, too; add it"
    if arguments.draft_weights is not None and arguments.drafts is None:
        yield f"--draft-weights {arguments.draft_weights}: expected --drafts, too; add it"
    if arguments.draft_weights is not None and "ours" not in arguments.servers:
        yield f"--draft-weights {arguments.draft_weights}: expected ours among the servers; leave it out"


def _of_flags(given: Mapping[str, str]) -> Iterator[str]:
    for flag, value in given.items():
        option = "--drafts, --steps and --accepted" if flag.startswith(SPECULATIVE) else OPTIONS.get(flag)
        if option is not None:
            yield f"--flags: expected no {flag}, for which there is {option}"
        elif flag in WHOLE_NUMBERS and not (value.isdecimal() and int(value) > 0):
            yield f"--flags: {flag}: expected a number of at least 1, found '{value}'"
        elif flag == SHARE and not _is_share(value):
            yield f"--flags: {flag}: expected a number above 0 and below 1, found '{value}'"


def _is_share(text: str) -> bool:
    try:
        return 0 < float(text) < 1
    except ValueError:
        return False


def _of_sizes(arguments: argparse.Namespace, start: Start) -> Iterator[str]:
    """Requests that a server refuses or does not run at once."""
    given = given_flags(server_flags(arguments, start)[0])
    most = max([*start.concurrency, *start.trace], default=0)
    if (limit := int(given["--max-running-requests"])) < most:
        yield f"--flags: --max-running-requests {limit}: expected {most}, the requests at once, or more"
    lengths = {
        f"--prompt {arguments.prompt} and --tokens {arguments.tokens}": arguments.prompt + arguments.tokens,
        f"--trace, {TRACED_TOKENS} tokens behind --prompt {arguments.prompt}": (
            arguments.prompt + TRACED_TOKENS if start.trace else 0
        ),
        "--long": LONG_PROMPT + LONG_ANSWER if start.long else 0,
    }
    for words, length in lengths.items():
        if length > (context := int(given["--context-length"])):
            yield f"{words}: expected {context} tokens at most, --context-length of the servers, found {length}"
