"""No module outside ``targets`` asks which target it runs on: what differs is a field of the target's descriptor."""

from __future__ import annotations

import ast

import pytest

from nvfp4_sgl.targets.target import TARGETS, descriptor, modes, words
from tests.packaging.checkout import PACKAGE, sources

WORDS = {name for each in TARGETS if each.on_gpu for name in (each.word, each.name)}
"""Names of targets; "cpu" is a device's name, too."""


def comparisons(source: str) -> list[int]:
    """Lines that compare something with a target or its name."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Compare):
            continue
        for inner in (part for side in (node.left, *node.comparators) for part in ast.walk(side)):
            is_member = isinstance(inner, ast.Attribute) and inner.attr == "word"
            is_name = isinstance(inner, ast.Constant) and inner.value in WORDS
            if is_member or is_name:
                found.add(node.lineno)
    return sorted(found)


def test_no_branch_on_a_target_outside_targets() -> None:
    files = [file for file in sources(PACKAGE) if file.relative_to(PACKAGE).parts[0] != "targets"]
    assert len(files) > 100
    found = {str(file.relative_to(PACKAGE)): lines for file in files if (lines := comparisons(file.read_text()))}
    assert not found, f"let a field of nvfp4_sgl.targets.target.Descriptor say what differs: {found}"


@pytest.mark.parametrize(
    "source",
    [
        "target == CPU.word",
        "if detect_target() != HOPPER.word and x: pass",
        'target == "sm_100a"',
        "target in (HOPPER.word, SM100.word)",
    ],
)
def test_branches_are_seen(source: str) -> None:
    assert comparisons(source) == [1]


@pytest.mark.parametrize("source", ["choose(CPU.word)", "descriptor(target).on_gpu", 'device == "cpu"'])
def test_other_uses_pass(source: str) -> None:
    assert not comparisons(source)


def test_each_mode_of_a_word_is_one_target() -> None:
    for word in words():
        for mode in modes(word):
            (found,) = [each for each in TARGETS if each.word == word and mode in each.modes]
            assert descriptor(word, mode) is found
        assert descriptor(word) is descriptor(word, modes(word)[0])
    assert [each.name for each in TARGETS] == ["cpu", "hopper", "hopper_w4a4", "sm100"]
