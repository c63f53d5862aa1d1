"""The command line of a program by its source, without importing it: it may need what is not installed yet.

``python3 options.py help NAME PROGRAM``, or ``check NAME PROGRAM ARGUMENT...``.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

WIDTH, COLUMN = 118, 26
TOPS = Path(__file__).parents[1], Path(__file__).parents[2]
"""Folders that programs import from by name."""
TYPES: dict[str, type] = {"int": int, "float": float, "Path": str}
"""Types that are checked here; others are the program's own."""


Names = Mapping[str, ast.expr]
"""What a file's constants are set to."""


def constants(source: str) -> Names:
    """Names that a file sets once at its top, or imports from a file of this repository that does."""
    found: dict[str, ast.expr] = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            files = [(top / node.module.replace(".", "/")).with_suffix(".py") for top in TOPS]
            set_there = next((set_in(file.read_text(encoding="utf-8")) for file in files if file.is_file()), {})
            found |= {one.asname or one.name: set_there[one.name] for one in node.names if one.name in set_there}
    return found | set_in(source)


def set_in(source: str) -> dict[str, ast.expr]:
    """Names that a file sets once at its top."""
    return {
        target.id: node.value
        for node in ast.parse(source).body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }


def shown(node: ast.expr, names: Names) -> str:
    """A value as its literal, by way of a constant of the file; else its source."""
    found = names.get(node.id, node) if isinstance(node, ast.Name) else node
    try:
        return str(ast.literal_eval(found))
    except ValueError:
        return ast.unparse(node)


def text_of(node: ast.expr, default: str, names: Names) -> str:
    """A help text; values that only the running program knows are shown as their source."""
    parts = node.values if isinstance(node, ast.JoinedStr) else [node]
    text = "".join(shown(part.value if isinstance(part, ast.FormattedValue) else part, names) for part in parts)
    return text.replace("%(default)s", default).replace("%%", "%")


def literal(node: ast.expr, names: Names) -> Any:
    """A keyword's value as its literal or a constant says it; ``None`` if only the running program knows."""
    if ast.unparse(node) == "argparse.REMAINDER":
        return argparse.REMAINDER
    try:
        return ast.literal_eval(names.get(node.id, node) if isinstance(node, ast.Name) else node)
    except ValueError:
        return None


def keywords(call: ast.Call, names: Names) -> dict[str, Any]:
    """Keywords of an ``add_argument`` as far as they are plain; no defaults, which are the program's."""
    given = {keyword.arg: keyword.value for keyword in call.keywords}
    plain = ("action", "choices", "metavar", "nargs", "required")
    found = {name: literal(given[name], names) for name in plain if name in given}
    if "type" in given:
        found["type"] = TYPES.get(ast.unparse(given["type"]))
    default = shown(given["default"], names) if "default" in given else "None"
    if "help" in given:
        hidden = ast.unparse(given["help"]) == "argparse.SUPPRESS"
        found["help"] = argparse.SUPPRESS if hidden else text_of(given["help"], default, names).replace("%", "%%")
    return {name: value for name, value in found.items() if value is not None} | {"default": argparse.SUPPRESS}


def calls(source: str, name: str) -> list[ast.Call]:
    """Calls of a method ``name``, in order."""
    nodes = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))
    found = [node for node in nodes if isinstance(node.func, ast.Attribute) and node.func.attr == name]
    return sorted(found, key=lambda node: node.lineno)


def files(program: Path) -> list[Path]:
    """``program``, and the file that its options are shared with, if it imports them."""
    text = program.read_text(encoding="utf-8")
    shared = program.parent / "full_size.py"
    return [shared, program] if "shared_options" in text and program != shared else [program]


def parser_of(program: Path, name: str = "") -> argparse.ArgumentParser:
    """A parser that takes what ``program`` takes, as far as its source says."""
    # A name that several verbs have is one option here.
    parser = argparse.ArgumentParser(
        prog=name,
        allow_abbrev=False,
        add_help=False,
        conflict_handler="resolve",
        formatter_class=partial(argparse.HelpFormatter, width=WIDTH, max_help_position=COLUMN),
    )
    parser.add_argument("-h", "--help", action="help", help="print this")
    for file in files(program):
        source = file.read_text(encoding="utf-8")
        # full_size.py has options of its own beside the shared ones.
        skipped = own_options(source) if file != program else set()
        known = constants(source)
        for call in calls(source, "add_argument"):
            flags = [str(a.value) for a in call.args if isinstance(a, ast.Constant)]
            if call.lineno not in skipped:
                parser.add_argument(*flags, **keywords(call, known))
    return parser


def own_options(source: str) -> set[int]:
    """Lines of ``options``, whose options are not shared."""
    found = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef) and node.name == "options"]
    return {line for node in found for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)}


def check(program: Path, name: str, given: list[str]) -> None:
    """Refuse arguments that ``program`` would refuse: argparse's error, and exit status 2."""
    if calls(program.read_text(encoding="utf-8"), "add_subparsers"):
        return  # what a verb takes is known to the program alone
    end = given.index("--") if "--" in given else len(given)
    parser_of(program, name).parse_args(given[:end])


def print_options(program: Path) -> None:
    """The part of a help that lists arguments."""
    parser = parser_of(program)
    formatter = parser._get_formatter()
    for group in parser._action_groups:
        formatter.start_section(group.title)
        formatter.add_arguments(group._group_actions)
        formatter.end_section()
    print("\n" + formatter.format_help().strip("\n"))


if __name__ == "__main__":
    what, name, program, *given = sys.argv[1:]
    if what == "check":
        check(Path(program), name, given)
    else:
        print_options(Path(program))
