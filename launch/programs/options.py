"""Prints the options in a program's source without importing it: it may need what is not installed yet."""

from __future__ import annotations

import ast
import sys
import textwrap
from pathlib import Path

WIDTH, COLUMN = 118, 26


def text_of(node: ast.expr, default: str) -> str:
    """A help text; values that only the running program knows are shown as their source."""
    if isinstance(node, ast.Constant):
        text = str(node.value)
    elif isinstance(node, ast.JoinedStr):
        values = [v.value if isinstance(v, ast.FormattedValue) else v for v in node.values]
        text = "".join(str(v.value) if isinstance(v, ast.Constant) else ast.unparse(v) for v in values)
    else:
        text = ast.unparse(node)
    return text.replace("%(default)s", default).replace("%%", "%")


def options(source: str) -> list[tuple[str, str]]:
    """(names, help) of each ``add_argument`` in ``source``, in order."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        if node.func.attr != "add_argument":
            continue
        names = [str(a.value) for a in node.args if isinstance(a, ast.Constant)]
        given = {keyword.arg: keyword.value for keyword in node.keywords}
        default = ast.unparse(given["default"]) if "default" in given else "None"
        told = text_of(given["help"], default) if "help" in given else ""
        if "choices" in given and isinstance(given["choices"], (ast.Tuple, ast.List)):
            told = f"{told} {ast.unparse(given['choices'])}".strip()
        found.append((node.lineno, ", ".join(names), told))
    return [(names, told) for _, names, told in sorted(found)]


def files(program: Path) -> list[Path]:
    """``program``, and the file that its options are shared with, if it imports them."""
    text = program.read_text(encoding="utf-8")
    shared = program.parent / "full_size.py"
    return [program, shared] if "shared_options" in text and program != shared else [program]


def main() -> None:
    for file in files(Path(sys.argv[1])):
        for names, told in options(file.read_text(encoding="utf-8")):
            lines = textwrap.wrap(told, WIDTH - COLUMN) or [""]
            if len(names) > COLUMN - 4:
                print(f"  {names}")
            else:
                print(f"  {names:<{COLUMN - 2}}{lines.pop(0)}".rstrip())
            for line in lines:
                print(" " * COLUMN + line)


if __name__ == "__main__":
    main()
