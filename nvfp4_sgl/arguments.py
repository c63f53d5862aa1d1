"""Arguments that several commands have: one name, metavar and help for one thing. Imports nothing that takes time."""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from nvfp4_sgl.errors import ConfigError, UnsupportedError
from nvfp4_sgl.ops.modes import ActivationMode
from nvfp4_sgl.targets.choose import detect_target
from nvfp4_sgl.targets.driver import sees_gpu
from nvfp4_sgl.targets.target import CPU, descriptor, modes, words

MAX_RANKS = 1024
MAX_SEED = 2**63 - 1
"""What torch's generators take."""
NEW_NAMES = {"--tp-size": "--tp", "--tensor-parallel-size": "--tp"}
"""What servers and people call an option, by what it is called here."""


def add_checkpoint(parser: argparse.ArgumentParser, *, optional: bool = False, more: str = "") -> None:
    """``DIR``, as ``directory``."""
    nargs = "?" if optional else None
    parser.add_argument("directory", nargs=nargs, type=Path, metavar="DIR", help=f"checkpoint directory{more}")


def add_output(parser: argparse.ArgumentParser, help: str) -> None:
    """``OUT``, as ``output``: a folder that is written."""
    parser.add_argument("output", type=Path, metavar="OUT", help=help)


def add_target(parser: Any, targets: Sequence[str] | None = None, more: str = "") -> None:
    """``--target``, one of ``targets``, all unless given; ``None`` is this machine's."""
    names = words() if targets is None else targets
    parser.add_argument("--target", choices=names, help=f"whose kernels run (default: this machine's){more}")


def add_mode(parser: argparse.ArgumentParser, default: str) -> None:
    """``--mode``; ``None`` is the default."""
    names = [mode.value for mode in ActivationMode]
    parser.add_argument(
        "--mode", choices=names, help=f"activation_mode: what enters GEMMs with quantised weights (default: {default})"
    )


def add_ranks(parser: Any, *, several: bool = False) -> None:
    """``--tp``, as ``ranks``: a number, or a list of some."""
    which = "tensor-parallel sizes" if several else "tensor-parallel size"
    parser.add_argument(
        "--tp",
        type=whole_number(MAX_RANKS),
        nargs="+" if several else None,
        default=[1] if several else 1,
        metavar="N",
        dest="ranks",
        help=f"{which}, a server's --tp-size (default: 1)",
    )
    for name in NEW_NAMES:
        parser.add_argument(name, action=_Renamed, nargs="*", help=argparse.SUPPRESS)


def named_here(text: str) -> str:
    """``text`` of code that servers run, too, with the options of :func:`add_ranks` by their name here."""
    for name, here in NEW_NAMES.items():
        text = re.sub(rf"(?<![\w-]){name}(?![\w-])", here, text)
    return text


def add_seed(parser: argparse.ArgumentParser, of: str) -> None:
    """``--seed``."""
    parser.add_argument(
        "--seed", type=whole_number(MAX_SEED, least=0), default=0, metavar="N", help=f"seed of {of} (default: 0)"
    )


def add_bound(parser: argparse.ArgumentParser, help: str, default: float | None = None) -> None:
    """``--bound``: an error that is too large; ``default`` is for the command to choose if ``None``."""
    parser.add_argument("--bound", type=error_bound, default=default, metavar="X", help=help)


def add_prompt(parser: argparse.ArgumentParser, default: int) -> None:
    """``--prompt`` and ``--steps``: the passes of a run."""
    parser.add_argument(
        "--prompt", type=int, default=default, metavar="TOKENS", help=f"tokens of the first pass (default: {default})"
    )
    parser.add_argument("--steps", type=int, default=2, metavar="N", help="decode steps after it (default: 2)")


def add_threads(parser: argparse.ArgumentParser) -> None:
    """``--threads``; ``None`` is for the command to choose."""
    parser.add_argument("--threads", type=positive, metavar="N", help="threads that read files (default: one a core)")


def add_json(parser: argparse.ArgumentParser) -> None:
    """``--json``."""
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of text")


def print_json(report: object) -> None:
    """Print the one document of ``--json``; NaN and infinities, which JSON has not, are ``null``."""
    print(json.dumps(_with_null(report), indent=2, allow_nan=False))


def _with_null(value: object) -> object:
    if isinstance(value, dict):
        return {name: _with_null(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_with_null(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def check_passes(prompt: int, steps: int) -> None:
    """Refuse passes that :func:`add_prompt` parses and that nothing can run."""
    if prompt < 1 or steps < 0:
        raise ConfigError(f"--prompt {prompt} --steps {steps}: expected at least 1 token, and no less than 0 steps")


def target_here(name: str | None) -> str:
    """The target of that ``name``, this machine's if ``None``; one that cannot run here is refused at once."""
    if name is not None and not descriptor(name).on_gpu:
        return name
    # The driver answers in milliseconds, where torch takes seconds to import.
    here = detect_target() if sees_gpu() else CPU.word
    if name not in (None, here):
        raise UnsupportedError(
            f"--target {name}: expected a GPU of that kind here, found {here}; run this on such a machine, or"
            " leave --target out"
        )
    return here


def require_mode(target: str, name: str) -> ActivationMode:
    """The mode of that ``name``, if ``target`` runs it."""
    mode = ActivationMode(name)
    if mode not in modes(target):
        known = ", ".join(each.value for each in modes(target))
        raise ConfigError(f"--mode {name}: {target} runs {known}; pass one of them, or another --target")
    return mode


def positive(text: str) -> int:
    """An argparse type: a number of at least 1."""
    if text.isdecimal() and int(text) > 0:
        return int(text)
    raise argparse.ArgumentTypeError(f"expected a number of at least 1, found '{text}'")


def error_bound(text: str) -> float:
    """An argparse type: a finite number of at least 0. Nothing would depart from NaN."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"expected a finite number of at least 0, found '{text}'")
    return value


def whole_number(most: int, least: int = 1) -> Callable[[str], int]:
    """An argparse type: ``least`` to ``most``."""

    def parse(text: str) -> int:
        if text.isascii() and text.isdigit() and len(text) <= 20 and least <= int(text) <= most:
            return int(text)
        raise argparse.ArgumentTypeError(f"expected a whole number from {least} to {most}, found '{text}'")

    return parse


class _Renamed(argparse.Action):
    """Another name of an option: an error says which is taken."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object, **__: object) -> NoReturn:
        name = next(name for name in self.option_strings)
        parser.error(f"{name}: this option is {NEW_NAMES[name]} here")
