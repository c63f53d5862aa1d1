"""``nvfp4-sgl trace``: the first op, and the first token, in which two runs depart."""

from __future__ import annotations

import argparse
import itertools
import math
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from nvfp4_sgl.arguments import (
    add_bound,
    add_json,
    add_mode,
    add_prompt,
    add_seed,
    add_target,
    check_passes,
    print_json,
    require_mode,
    target_here,
)
from nvfp4_sgl.checkpoint.verified import verify
from nvfp4_sgl.errors import ConfigError
from nvfp4_sgl.files import refuse_hub_cache
from nvfp4_sgl.ops.modes import ActivationMode
from nvfp4_sgl.targets.target import modes
from nvfp4_sgl.terminal import Status
from nvfp4_sgl.tracing.bounds import default_bound
from nvfp4_sgl.tracing.diff import Difference, OtherTokens, PassTokens, differences, left_out, tokens_of
from nvfp4_sgl.tracing.fed import check_drawn, check_fed
from nvfp4_sgl.tracing.reading import Record, read_record

SHOWN_RISES = 5
SHOWN_IDS = 8
"""Token ids of a pass that are printed."""
DRAWN = ("prompt", "steps", "seed")
"""Options of the prompt that a checkpoint A draws; ``None`` unless given."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``nvfp4-sgl trace``."""
    parser.description = (
        "Compare two runs, op by op and token by token. A run is a record (NVFP4_SGL_TRACE=FOLDER at a server's start;"
        " a file for each rank), its folder, or a checkpoint directory. A checkpoint runs here; B gets A's tokens."
    )
    parser.add_argument("first", type=Path, metavar="A", help="the run to compare with")
    parser.add_argument(
        "second", nargs="?", type=Path, metavar="B", help="the other run (default: the checkpoint A in another mode)"
    )
    add_target(parser)
    add_mode(parser, "not A's, if the target has another")
    parser.add_argument(
        "--first-mode",
        choices=[mode.value for mode in ActivationMode],
        help="activation_mode of a checkpoint A (default: the target's)",
    )
    add_prompt(parser, 64)
    add_seed(parser, "the prompt of a checkpoint A")
    defaults = {name: parser.get_default(name) for name in DRAWN}
    parser.set_defaults(**dict.fromkeys(DRAWN), drawn=defaults)
    small, large = (default_bound([mode], of_a_run=True) for mode in (ActivationMode.W4A16, ActivationMode.W4A4))
    add_bound(parser, f"error above which an op departs (default: {small:g}; if A or B is of w4a4 {large:g})")
    parser.add_argument("--exact", action="store_true", help="an op departs if any of its bits differs")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Compare and print; 1 if an op or a token departs, or if a part of a run was not compared."""
    with tempfile.TemporaryDirectory(prefix="nvfp4-sgl-trace-") as folder, Status("trace") as status:
        first, second = records(args, Path(folder), status.say)
    found, stopped = [], shorter(first, second)
    try:
        for each in differences(first, second):
            found.append(each)
    except OtherTokens as error:
        if not error.number:
            raise
        stopped = str(error)
    if not found:
        raise ConfigError(
            f"{first.file}, {second.file}: expected at least a pass in both, found none; record them again"
        )
    bound = default_bound((first.mode, second.mode), of_a_run=True) if args.bound is None else args.bound
    passes, without = tokens_of(first, second), left_out(first, second)
    op = next((each for each in found if departs(each, bound, args.exact)), None)
    token = next((each for each in passes if each.departs), None)
    if args.json:
        print_json(
            {
                "bound": bound,
                "departs": op and as_json(op),
                "tokens_depart": token and asdict(token),
                "stopped": stopped,
                "recorded": [len(first.passes), len(second.passes)],
                "left_out": without,
                "passes": [asdict(each) for each in passes],
                "ops": [as_json(each) for each in found],
            }
        )
    else:
        print("\n".join(token_lines(passes, op, token)))
        if stopped is not None:
            print(f"what follows cannot be compared: {stopped}")
        if without:
            print(ranks_line(first, second, without))
        print(report(found, op, bound))
    return 1 if op or token or stopped else 0


def shorter(first: Record, second: Record) -> str | None:
    """A line where one record has fewer passes than the other."""
    a, b = len(first.passes), len(second.passes)
    return None if a == b else f"A has {a} passes, B {b}: only the first {min(a, b)} were compared"


def ranks_line(first: Record, second: Record, without: tuple[str, ...]) -> str:
    """A line that says what was not compared, and why."""
    a, b = (f"rank {each.rank} of {each.ranks}" for each in (first, second))
    return f"left out: {', '.join(without)}: each rank has its own part there, and A is of {a}, B of {b}"


def records(args: argparse.Namespace, folder: Path, say: Callable[[str], None]) -> tuple[Record, Record]:
    """The records of A and B; of a checkpoint one that is made in ``folder``. ``say`` takes what is begun."""
    checkpoint = is_checkpoint(args.first)
    if args.second is None and not checkpoint:
        raise ConfigError(f"{args.first}: expected B, too, a record or a checkpoint, since A is a record")
    second = args.second or args.first
    forced = is_checkpoint(second)
    if checkpoint and not forced:
        raise ConfigError(f"{second}: expected a checkpoint as A is one; pass the record first, then the checkpoint")
    if not checkpoint:
        refuse(args, args.first, "first_mode", "made in a mode already")
        for name in DRAWN:
            refuse(args, args.first, name, "made of its own tokens")
    if not forced:
        refuse(args, second, "mode", "made in a mode already")
        refuse(args, second, "target", "made on a target already")
        return read_record(record_in(args.first)), read_record(record_in(second))
    # All that can be refused is refused before torch is imported, which takes seconds, or a weight is read.
    for name in DRAWN:
        if getattr(args, name) is None:
            setattr(args, name, args.drawn[name])
    check_passes(args.prompt, args.steps)
    target = target_here(args.target)
    default = modes(target)[0]
    first_mode = default if args.first_mode is None else require_mode(target, args.first_mode)
    mode = second_mode(args, target, first_mode) if args.mode is None else require_mode(target, args.mode)
    config = verify(second).config
    given = None if checkpoint else read_record(record_in(args.first))
    if given is None:
        check_drawn(args.prompt, args.steps, args.first, config if args.second is None else verify(args.first).config)
    else:
        check_fed(given, second, config)
    say("importing torch")
    from nvfp4_sgl.tracing.runs import run_forced, run_greedy

    made, ours = folder / "first.jsonl", folder / "second.jsonl"
    if given is None:
        drawn = {name: getattr(args, name) for name in DRAWN}
        run_greedy(args.first, made, target, first_mode, **drawn, say=say)
        given = read_record(made)
    run_forced(second, ours, target, mode, given, say)
    return given, read_record(ours)


def refuse(args: argparse.Namespace, record: Path, name: str, why: str) -> None:
    """Refuse an option that a record cannot follow any more."""
    if getattr(args, name) is not None:
        option = f"--{name.replace('_', '-')}"
        raise ConfigError(f"{option} {getattr(args, name)}: {record} is a record, {why}; leave {option} out")


def second_mode(args: argparse.Namespace, target: str, first: ActivationMode) -> ActivationMode:
    """The mode of B where none is given: another one of the same checkpoint, else the target's."""
    others = [mode for mode in modes(target) if mode is not first]
    return others[0] if args.second is None and others else modes(target)[0]


def is_checkpoint(path: Path) -> bool:
    """Whether a run is made from ``path``, a folder with config.json; otherwise it is a record, or a folder of them."""
    if not path.exists():
        raise ConfigError(f"{path}: expected a record, a folder of records or a checkpoint, found nothing of that name")
    if not path.is_dir():
        return False
    refuse_hub_cache(path, ConfigError)
    if (path / "config.json").is_file():
        return True
    if not record_in(path).is_file():
        others = sorted(file.name for file in path.glob("rank*.jsonl"))
        found = f"{others[0]} without it; name that file" if others else "neither in it"
        raise ConfigError(f"{path}: expected a folder with rank0.jsonl, or with config.json, found {found}")
    return False


def record_in(path: Path) -> Path:
    """``path``, or of a folder of records the first rank's."""
    return path / "rank0.jsonl" if path.is_dir() else path


def departs(each: Difference, bound: float, exact: bool) -> bool:
    return not each.error <= bound or (exact and not each.equal)


def as_json(each: Difference) -> dict[str, Any]:
    """An op as an object that JSON can hold: an infinite error is ``None``, and ``why`` says why."""
    return asdict(each) | {"error": each.error if math.isfinite(each.error) else None}


def token_lines(passes: list[PassTokens], op: Difference | None, token: PassTokens | None) -> list[str]:
    """Lines on the tokens of each pass, fed and chosen, up to the first in which something departs."""
    last = min([each.number for each in (op, token) if each is not None], default=len(passes))
    lines = []
    for each in passes[: last + 1]:
        shown = " ".join(map(str, each.ids[:SHOWN_IDS])) + (" …" if len(each.ids) > SHOWN_IDS else "")
        a, b = ("?" if chosen is None else chosen for chosen in each.chose)
        chose = f"A chose {a}, B chose {b}" if a != b else f"both chose {a}"
        lines.append(f"pass {each.number}: {len(each.ids)} tokens from position {each.positions[0]}: {shown}; {chose}")
    if token is not None:
        lines.append(f"the first token that departs: pass {token.number}, {token.chose[0]} in A, {token.chose[1]} in B")
    return lines


def report(found: list[Difference], first: Difference | None, bound: float) -> str:
    """A report of what departs, what other bits begin with, and where errors grow most from one op to the next."""
    passes = found[-1].number + 1
    lines = [f"{len(found)} ops in {passes} passes, {sum(each.equal for each in found)} equal bit for bit"]
    other = next((each for each in found if not each.equal), None)
    if other is not None:
        lines.append(f"first with other bits: pass {other.number}, {other.name}, error {other.error:.2g}")
    if first is None:
        lines.append(f"no op departs: errors are at most {max(each.error for each in found):.2g} (bound {bound:g})")
    else:
        why = (
            first.why
            or f"error {first.error:.2g}, {'bits differ; bound' if first.error <= bound else 'beyond'} {bound:g}"
        )
        lines.append(f"the first that departs: pass {first.number}, {first.name}: {why}")
    rises = sorted(_rises(found), reverse=True)[:SHOWN_RISES]
    lines += [f"  error grows {before:.2g} to {after:.2g}: pass {n}, {name}" for _, before, after, n, name in rises]
    return "\n".join(lines)


def _rises(found: list[Difference]) -> list[tuple[float, float, float, int, str]]:
    pairs = itertools.pairwise(found)
    finite = [(a, b) for a, b in pairs if a.number == b.number and math.isfinite(a.error) and math.isfinite(b.error)]
    return [(b.error - a.error, a.error, b.error, b.number, b.name) for a, b in finite if b.error > a.error]
