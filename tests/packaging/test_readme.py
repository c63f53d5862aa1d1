"""README.md: versions, targets, modes, numbers of GPUs and refusals are those of the code and of recorded runs."""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterator

import pytest

from nvfp4_sgl.plugin import DISABLE_VARIABLE
from nvfp4_sgl.serving.flags import ROWS
from nvfp4_sgl.serving.flags.row import Refused
from nvfp4_sgl.serving.sglang.private import VERSION
from nvfp4_sgl.targets.target import TARGETS
from tests.packaging.checkout import ROOT

sys.path.append(str(ROOT / "launch"))  # its packages are imported by bare name
from benchmarks.figures import FIGURES, RESULTS, read

README = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
COUNTS = {"one": 1, "two": 2, "four": 4, "eight": 8}
RUNS = {"Hopper": "sm_90a", "SM100": "sm_100a", "CPU": "cpu"}
"""Words of targets, by the first word of a row of "What runs where"."""
REFUSED = {
    "pipeline": "pp_size",
    "expert": "ep_size",
    "data parallelism": "dp_size",
    "LoRA": "enable_lora",
}
"""Flags of what the page says is refused by name."""


def recorded_runs() -> set[tuple[int, str]]:
    """(GPUs, machine) of every recorded figure, and of the headings of the notebook of GPU tests."""
    figures = [one for file in FIGURES.glob("*.json") for one in read(file)]
    found = {(one.cards, one.machine.removeprefix("NVIDIA ")) for one in figures if one.cards is not None}
    headings = re.findall(r"^## (\w+) (H\d00)", (RESULTS / "gpu_tests_h200.md").read_text(encoding="utf-8"), re.M)
    return found | {(COUNTS[count.lower()], machine) for count, machine in headings if count.lower() in COUNTS}


def faults(text: str) -> Iterator[str]:
    """What README.md says, in one line, against the code and the data."""
    python = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["classifiers"]
    versions = [name.rpartition(" ")[2] for name in python if re.search(r":: 3\.\d+$", name)]
    if set(re.findall(r"SGLang\S* (\d\S*)[:,]", text)) != {VERSION}:
        yield f"expected SGLang {VERSION}"
    if set(re.findall(r"CPython ([\d.]+) or ([\d.]+)", text)) != {tuple(versions)}:
        yield f"expected CPython {' or '.join(versions)}"
    if f"`{DISABLE_VARIABLE}=1`" not in text:
        yield f"expected {DISABLE_VARIABLE}"
    for name, word in RUNS.items():
        row = re.search(rf"\| {name}\b[^|]*\|[^|]*\|", text)
        modes = {mode.value for target in TARGETS if target.word == word for mode in target.modes}
        if row is None or set(re.findall(r"w\d+a\d+", row[0])) != modes:
            yield f"{name}: expected the modes {sorted(modes)}"
    runs = {
        (COUNTS[count], machine)
        for counts, machine in re.findall(r"((?:\w+, )*(?:\w+ and )?\w+) (H\d00)s?\b", text)
        for count in re.findall(r"\w+", counts)
        if count in COUNTS
    }
    yield from (f"{count} {machine}: no recorded run" for count, machine in sorted(runs - recorded_runs()))
    refusals = text.partition("It refuses by name")[2].partition(". ")[0]
    for said, flag in REFUSED.items():
        if said not in refusals or not isinstance(ROWS[flag], Refused):
            yield f"{said}: expected it among what is refused, and {flag} to be refused"


def test_what_the_readme_says_is_so() -> None:
    assert not list(faults(README))


@pytest.mark.parametrize(
    ("said", "wrong", "fault"),
    [
        (f"SGLang](https://github.com/sgl-project/sglang) {VERSION}", "SGLang 0.5.24", "expected SGLang"),
        ("CPython 3.11 or 3.12", "CPython 3.11 or 3.13", "expected CPython"),
        ("NVFP4_SGL_DISABLE=1", "NVFP4_SGL_OFF=1", "expected NVFP4_SGL_DISABLE"),
        ("NVFP4 × NVFP4 (`w4a4`)", "NVFP4 × NVFP4 (`w4a16`)", "SM100: expected the modes"),
        ("one, two and four H200s", "one, two, four and eight H200s", "8 H200: no recorded run"),
        ("two H100s", "four H100s", "4 H100: no recorded run"),
        ("data parallelism, LoRA", "data parallelism", "LoRA: expected it among what is refused"),
    ],
)
def test_what_is_not_so_is_seen(said: str, wrong: str, fault: str) -> None:
    assert said in README
    assert any(found.startswith(fault) for found in faults(README.replace(said, wrong)))
