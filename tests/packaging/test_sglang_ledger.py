"""SGLang's private names: each is in the ledger, and used in one place. Read from the sources."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Collection, Iterator
from typing import Any

import pytest

from nvfp4_sgl.serving.sglang.hooked import HOOKS
from nvfp4_sgl.serving.sglang.log_lines import IMPORT_WARNINGS, LEFT_OUT, LEFT_OUT_ON_CPU
from nvfp4_sgl.serving.sglang.names import MODULES, NAMES
from tests.packaging.checkout import PACKAGE, imports, sources

SERVING = PACKAGE / "serving"
GLUE = SERVING / "sglang"
LEDGER = {GLUE / "names.py", GLUE / "hooked.py", GLUE / "log_lines.py"}
ENTRY_POINTS = ("sglang.srt.platforms", "sglang.srt.plugins")
"""Public: groups of entry points."""


def looked_up(source: str, function: str) -> Iterator[Any]:
    """Keys that ``source`` gives to ``function`` of :mod:`nvfp4_sgl.serving.sglang.ledger`."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and ast.unparse(node.func).removeprefix("ledger.") == function:
            (key,) = node.args
            assert isinstance(key, ast.Constant), f"line {node.lineno}: {function}() takes a name, not an expression"
            yield key.value


def installed(source: str) -> Iterator[Any]:
    """Keys of hooks that ``source`` installs: in calls of ``install_hooks`` and in tables named ``…HOOKS``."""
    for node in ast.walk(ast.parse(source)):
        is_call = isinstance(node, ast.Call) and ast.unparse(node.func).endswith("install_hooks")
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        is_table = isinstance(target, ast.Name) and target.id.endswith("HOOKS")
        for inner in ast.walk(node) if is_call or is_table else ():
            if isinstance(inner, ast.Dict):
                yield from (key.value for key in inner.keys if isinstance(key, ast.Constant))


def private_words(source: str) -> list[str]:
    """Dotted paths into SGLang in strings that are no docstrings, and attributes with an underscore.

    Those of ``self`` and ``cls`` are ours, or a base class's that ours overrides; some modules have such names, too.
    """
    tree = ast.parse(source)
    prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
            if node.value.startswith(("sglang.srt", "sglang.kernels")) and node.value not in ENTRY_POINTS:
                found.append(node.value)
        elif isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.endswith("__"):
            found += [ast.unparse(node)] * (ast.unparse(node.value) not in ("self", "cls", "super()", "os", "torch"))
    return found


def places(keys: Collection[str], found: dict[str, list[str]]) -> dict[str, list[str]]:
    """Keys that are not used in one file, and keys that are no entries, with the files that use them."""
    return {key: found.get(key, []) for key in {*keys, *found} if key not in keys or len(found.get(key, ())) != 1}


@pytest.mark.parametrize(("function", "table"), [("find", NAMES), ("module", MODULES), ("is_imported", MODULES)])
def test_each_name_is_looked_up_in_one_file(function: str, table: dict[str, object]) -> None:
    found: dict[str, list[str]] = defaultdict(list)
    for file in sources(SERVING):
        for key in set(looked_up(file.read_text(), function)):
            found[key].append(file.name)
    if table is MODULES:
        assert found and found.keys() <= table.keys() and all(len(files) == 1 for files in found.values()), dict(found)
    else:
        assert not (wrong := places(table, found)), wrong


def test_each_hook_is_installed_by_one_file() -> None:
    found: dict[str, list[str]] = defaultdict(list)
    for file in set(sources(SERVING)) - LEDGER:
        for key in set(installed(file.read_text())):
            found[key].append(file.name)
    assert not (wrong := places(HOOKS, found)), wrong


def test_no_private_name_outside_the_ledger() -> None:
    for file in set(sources(PACKAGE)) - LEDGER:
        source = file.read_text()
        assert not [found for found in imports(source) if found.top == "sglang"], file
        words = private_words(source) if file.is_relative_to(SERVING) else []
        paths = [word for word in words if word.startswith("sglang.")]
        assert not paths and (file.parent == GLUE or not words), f"{file.relative_to(PACKAGE)}: {words}"


def test_every_entry_says_why() -> None:
    for private in (*NAMES.values(), *MODULES.values(), *HOOKS.values()):
        assert private.path.startswith("sglang.") and private.why
    assert all(private.parameters is not None for private in HOOKS.values())
    assert all(name.startswith("sglang.") for name in (*LEFT_OUT, *LEFT_OUT_ON_CPU, *IMPORT_WARNINGS))


@pytest.mark.parametrize("source", ["request._finish()", 'x = "sglang.srt.utils"', 'f("sglang.kernels.ops:a")'])
def test_private_names_are_seen(source: str) -> None:
    assert private_words(source)


@pytest.mark.parametrize("source", ["self._x = cls._y", '"""Hooks sglang.srt.utils."""', "a.__class__", "request.rid"])
def test_other_words_pass(source: str) -> None:
    assert not private_words(source)


def test_uses_are_seen() -> None:
    assert [*looked_up('find("a")(ledger.find("b"))', "find")] == ["a", "b"]
    source = 'HOOKS: Mapping = {"a": f}\nhooking.install_hooks({"b": g, **HOOKS} | HOOKS)\nx = {"c": 1}'
    assert [*installed(source)] == ["a", "b"]
    assert places({"a", "b", "c"}, {"a": ["1"], "b": ["1", "2"], "d": ["1"]}) == {"b": ["1", "2"], "c": [], "d": ["1"]}
