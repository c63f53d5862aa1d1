"""Each Triton kernel as SM100 runs it, its PTX in the emulator, against itself in Triton's interpreter."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.sm100.emulator import HazardError, Options
from tests.sm100.support.triton_launch import emulated_triton
from tests.sm100.triton.cases import CASES
from tests.sm100.triton.cases.case import Outputs
from tests.sm100.triton.cases.indexer import choose, equal, nearly_equal
from tests.sm100.triton.damage import damage, leave_out
from tests.sm100.triton.interpreted import ROOT, interpreted

KERNELS = ROOT / "triton_kernels"
MARKED = [pytest.param(name, marks=[pytest.mark.full] if case.full else [], id=name) for name, case in CASES.items()]


@pytest.fixture(scope="module")
def expected(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outputs]:
    """What the interpreter makes of the cases that are run."""
    # Other files have fixtures of this name too.
    own = [item for item in request.session.items if item.path == request.path and isinstance(item, pytest.Function)]
    wanted = {item.callspec.params["name"] for item in own if "expected" in item.fixturenames}
    return interpreted(sorted(map(str, wanted)), tmp_path_factory.mktemp("interpreted"))


@pytest.mark.parametrize("name", MARKED)
def test_equals_its_interpreted_self(name: str, expected: dict[str, Outputs]) -> None:
    case = CASES[name]
    with emulated_triton() as emulator:
        found = case.compute()
    assert {launch.name for launch in emulator.launches} == case.kernels
    assert not case.differences(found, expected[name])


TOGETHER = [
    "few_heads_split_and_quantised",
    "next_site_quantised",
    "site_of_large_blocks",
    "routed_tokens",
    "a_routed_token",
    "compression_by_128",
    "logits_of_parts_of_k",
    "largest_logits",
    "guesses_of_a_block",
    "choice_among_chunks",
]
"""Kernels whose programs wait for one another, or whose last program finishes the work."""


@pytest.mark.parametrize("name", TOGETHER)
def test_order_of_programs_and_engines(name: str, expected: dict[str, Outputs]) -> None:
    """The last program first, warps in any order, copies and tensor cores late: the same."""
    with emulated_triton(Options(mode="random", seed=5, backwards=True)):
        found = CASES[name].compute()
    assert not CASES[name].differences(found, expected[name])


@pytest.mark.parametrize("name", ["first_site", "few_heads_split_and_quantised"])
def test_no_thread_waits_for_a_semaphore_that_is_zero_again(name: str) -> None:
    """A program's threads look for themselves, and the last program that has looked resets."""
    for seed in range(4):
        with emulated_triton(Options(mode="random", seed=seed)):
            CASES[name].compute()


COUNTED = [
    ("few_heads_split_and_quantised", "attend", "atom.global.gpu.acq_rel.add"),
    ("compression_by_128", "_attention_inputs", "atom.global.gpu.acq_rel.add"),
    ("routed_tokens", "_route_topk", "atom.global.gpu.acq_rel.add"),
    ("logits_of_parts_of_k", "_router_logits_split", "atom.global.gpu.acq_rel.add"),
    ("largest_logits", "_greedy_tokens", "atom.global.gpu.acq_rel.add"),
    ("guesses_of_a_block", "_markov_step", "atom.global.gpu.acq_rel.add"),
    ("choice_among_chunks", "_select_kernel", "atom.global.gpu.acq_rel.add"),
    ("next_site_quantised", "site_kernel", "atom.global.gpu.release.add"),
    ("next_site_quantised", "site_kernel", "ld.acquire.gpu"),
]


@pytest.mark.parametrize(("name", "kernel", "instruction"), COUNTED)
def test_programs_that_meet_are_ordered(
    name: str, kernel: str, instruction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where programs count one another in, the count hands on what they stored: a relaxed one would not."""
    order = next(part for part in instruction.split(".") if part in ("acq_rel", "acquire", "release"))
    damage(monkeypatch, kernel, instruction, instruction.replace(order, "relaxed"))
    with pytest.raises(HazardError, match="read of global memory .* without being ordered"), emulated_triton():
        CASES[name].compute()


@pytest.mark.full
@pytest.mark.parametrize("number", range(20))
def test_barriers_of_selection(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is needed in rows of up to 2,048 scores, but for two in slow paths, behind which there is another."""
    leave_out(monkeypatch, "_select_kernel", "bar.sync", number)
    seen = 0
    for columns, scores in ((1024, lambda scores: None), (1024, equal), (2048, nearly_equal)):
        for options in (Options(), Options(mode="random", seed=5, backwards=True)):
            try:
                with emulated_triton(options):
                    choose([513, columns - 24, columns], columns, 512, scores)
            except HazardError:
                seen += 1
    assert (seen == 0) == (number in (5, 13))


def launched_kernels(folder: Path) -> set[str]:
    """Names of what is launched as ``kernel[grid](…)``."""
    trees = (ast.parse(file.read_text()) for file in folder.rglob("*.py"))
    calls = (node.func for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Call))
    return {
        function.value.id
        for function in calls
        if isinstance(function, ast.Subscript) and isinstance(function.value, ast.Name)
    }


HOPPER_ALONE = {"attend_block"}
"""Kernels that are chosen before Blackwell alone (``attention.tiling.choose_tiling``)."""


def test_every_kernel_has_a_case() -> None:
    found = launched_kernels(KERNELS) - HOPPER_ALONE
    assert "attend" in found
    assert found == set().union(*(case.kernels for case in CASES.values() if not case.full))
