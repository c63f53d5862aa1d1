"""The parts of launch/bench_verify_attention that need no GPU: its launches agree, and are those of serving."""

from __future__ import annotations

import sys

import pytest

from nvfp4_sgl.config import LayerKind
from nvfp4_sgl.triton_kernels.attention.tiling import MIN_TOGETHER
from nvfp4_sgl.triton_kernels.common import chip
from tests.packaging.checkout import ROOT

sys.path.append(str(ROOT / "launch"))  # its scripts import each other by bare name

from benchmarks.prompt_attention import Prompts, compared
from benchmarks.verify_attention import CACHED, NAMES, PASSES, Verified, line


@pytest.mark.parametrize(("kind", "heads"), [(LayerKind.HCA, 16), (LayerKind.CSA, 32)])
def test_launches_agree_and_are_timed(kind: LayerKind, heads: int, device: str) -> None:
    case = Verified(2, 3, heads, kind)
    found = dict(compared(*case.runs(device, cached=130), lambda launch: 1.5))
    assert found == dict.fromkeys(NAMES, 1.5)
    assert line(case, found.items(), NAMES[1]).endswith(" | 1.5 | 1.5* | 1.5 |")


def test_entries_are_so_many() -> None:
    """And the window is full, as behind some 1.5 thousand tokens."""
    for kind, entries in ((LayerKind.HCA, 12), (LayerKind.CSA, 320)):
        prompts = Prompts(2, 6, kind.value, CACHED[kind])
        assert {*prompts.entries("cpu")[1].tolist()} <= {entries, entries + 1}
        assert {*prompts.windows("cpu")[1].tolist()} == {128}


def test_both_choices_of_serving_are_among_the_cases() -> None:
    if not chip.is_before_blackwell():
        pytest.skip("Blackwell gives each query its own program, and has no tiling to choose here")
    found = {(requests, each): Verified(requests, each, 16, LayerKind.HCA).chosen("cpu") for requests, each in PASSES}
    for (requests, each), name in found.items():
        assert name == NAMES[requests * each >= MIN_TOGETHER], (requests, each)
    assert {*found.values()} == {*NAMES[:2]}
