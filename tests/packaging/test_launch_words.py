"""Programs of launch call things as ``nvfp4-sgl`` does: docs/command_line.md has the words."""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from nvfp4_sgl import cli
from nvfp4_sgl.targets.target import words
from tests.packaging.checkout import ROOT

sys.path.append(str(ROOT / "launch"))  # its scripts import each other by bare name

from programs import evaluate, options

PROGRAMS = sorted(
    file for file in (ROOT / "launch").rglob("*.py") if "ArgumentParser(" in file.read_text() and file.stem != "options"
)
OTHER_WORDS = {
    "--ranks": "--tp",
    "--tp-size": "--tp",
    "--out": "--output",
    "--dir": "--output",
    "--folder": "--output",
    "--workers": "--jobs",
}
"""What is called otherwise, and how."""
WORDS = (
    "--target",
    "--tp",
    "--output",
    "--prompt",
    "--steps",
    "--seed",
    "--threads",
    "--jobs",
    "--concurrency",
    "--json",
)
PAGE = (ROOT / "docs" / "command_line.md").read_text(encoding="utf-8")


def listed(parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.Action]]:
    for action in parser._actions:
        for name in action.option_strings:
            yield name, action


def name_of(program: Path) -> str:
    return str(program.relative_to(ROOT / "launch"))


def takes(action: argparse.Action) -> bool:
    """Whether a value follows."""
    return action.nargs != 0


def commands() -> dict[str, argparse.Action]:
    """Options of ``nvfp4-sgl``, but those that only say what another is called."""
    found: dict[str, argparse.Action] = {}
    for command in cli.COMMANDS:
        (chosen,) = (a for a in cli.build_parser(command)._actions if isinstance(a, argparse._SubParsersAction))
        found |= dict(listed(chosen.choices[command]))
    return {name: action for name, action in found.items() if action.help != argparse.SUPPRESS}


@pytest.mark.parametrize("program", PROGRAMS, ids=name_of)
def test_a_word_is_that_of_the_commands(program: Path) -> None:
    known = commands()
    for name, action in listed(options.parser_of(program)):
        assert name not in OTHER_WORDS, f"{name}: is called {OTHER_WORDS[name]}"
        if name in WORDS and name in known:
            assert takes(action) == takes(known[name]), f"{name}: takes a value in one place only"
        if name == "--target":
            assert action.choices and set(action.choices) <= set(words())
        if name in ("--tp", "--output"):
            assert action.metavar in (["N"] if name == "--tp" else ["OUT", "FILE"])


@pytest.mark.parametrize("program", PROGRAMS, ids=name_of)
def test_help_has_values_instead_of_names_of_constants(program: Path) -> None:
    for name, action in listed(options.parser_of(program)):
        text = (action.help or "").replace("CUDA_VISIBLE_DEVICES", "")
        found = re.findall(r"\b[A-Z]+(?:_[A-Z]+)+\b", text)
        assert not found, f"{name}: what {found} is set to must be found without importing the program"


def test_a_constant_of_another_file_is_found() -> None:
    known = options.constants("from programs.options import WIDTH, COLUMN\nfrom programs.evaluate import WORST as MOST")
    assert set(known) == {"MOST"} and options.shown(ast.Name("MOST"), known) == str(evaluate.WORST)


def test_programs_and_their_options_are_found() -> None:
    assert {"programs/demo.py", "benchmarks/ready.py", "benchmarks/sm100/bench.py"} <= set(map(name_of, PROGRAMS))
    hopper = dict(listed(options.parser_of(ROOT / "launch/benchmarks/hopper.py")))
    assert {"--tp", "--tokens", "--dense", "--experts", "--output"} < set(hopper)
    assert hopper["--tp"].type is int and hopper["--dense"].nargs == 0


@pytest.mark.parametrize("word", WORDS)
def test_the_page_has_the_words(word: str) -> None:
    assert re.search(rf"^\| [^|]*`{word}`", PAGE, re.MULTILINE)
