"""The parts of launch/profile_decoder that need no GPU: reading a trace and judging what it names."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import pytest

from tests.packaging.checkout import ROOT

sys.path.append(str(ROOT / "launch"))  # its scripts import each other by bare name

from benchmarks import hopper_overlap, hopper_step, profile_decoder
from benchmarks.profile_decoder import our_kernels
from benchmarks.profile_report import Section, device_events, kind_of, median_launches


def event(name: str, begin: float, us: float, category: str = "kernel") -> dict[str, Any]:
    return {"name": name, "ts": begin, "dur": us, "cat": category}


def test_device_events_come_in_order_and_without_the_host():
    trace = [
        event("b", 20, 2),
        event("launch", 1, 9, "cuda_runtime"),
        event("a", 10, 1),
        event("m", 5, 3, "gpu_memset"),
    ]
    assert device_events([*trace, {"ph": "M", "name": "process_name"}]) == [("m", 3.0), ("a", 1.0), ("b", 2.0)]


def test_medians_are_of_each_launch():
    runs = [("a", 1.0), ("a", 10.0), ("a", 3.0), ("a", 30.0), ("a", 2.0), ("a", 90.0)]
    assert median_launches(runs, 3) == [("a", 2.0), ("a", 30.0)]


@pytest.mark.parametrize("names", ["ababa", "abba", "a", ""])
def test_runs_that_differ_are_refused(names: str):
    with pytest.raises(ValueError, match="equal runs"):
        median_launches([(name, 1.0) for name in names], 2)


PRODUCTS = [
    "nvjet_tst_64x8_64x16_1x2_h_bz_TNT",
    "void cutlass::device_kernel<at::cuda::detail::enable_3x_kernel_for_sm90<cutlass::gemm::kernel::GemmUniversal>>",
    "void at::cuda::detail::prepare_grouped_gemm_data<cutlass::bfloat16_t>",
    "splitKreduce_kernel<32, 16, int, float>",
    "void gemv2T_kernel_val<int, int, __nv_bfloat16>",
]


def test_kinds():
    ours = our_kernels()
    assert {"_copy_to_streams", "_scores_kernel", "_route_topk"} <= ours
    for name in ("_copy_to_streams", "nvfp4_sgl.triton_kernels.indexer.scores._scores_kernel"):
        assert kind_of(name, ours) == "ours"
    for name in PRODUCTS:
        assert kind_of(name, ours) == "product"
    for name in ("Memset (Device)", "void at::native::elementwise_kernel<128, 4>", "_some_other_kernel"):
        assert kind_of(name, ours) == "neither"


def test_text_counts_kinds():
    found = [("_mine", 2.0), ("nvjet", 3.0), ("_mine", 2.5)]
    section = Section.of("decode of 1", "SWA (layer 0)", found, {"_mine"}, us=6.25)
    heading, *lines = section.text().splitlines()
    counts = "1 product (3.0 us), 2 ours (4.5 us), 0 neither (0.0 us)"
    assert heading == f"decode of 1, SWA (layer 0): 3 launches in 6.2 us: {counts}"
    assert replace(section, us=None).text().startswith(f"decode of 1, SWA (layer 0): 3 launches: {counts}")
    assert [line.split()[-1] for line in lines] == ["_mine", "nvjet", "_mine"]


WRONG = {
    "--flash 0": "--flash: expected a whole number from 1 to 43, found '0'",
    "--flash 44": "--flash: expected a whole number from 1 to 43, found '44'",
    "--flash 2 --tp 3": "--tp: invalid choice: 3 (choose from 1, 2, 4, 8)",
    "--flash 2 --context -1": "--context: expected a whole number from 1 to 1048576, found '-1'",
    "--flash 2 --prompts 2x": "--prompts: expected a whole number from 1 to 1048576, found ''",
    "--flash 2 --prompts 0x1024": "--prompts: expected a whole number from 1 to 65536, found '0'",
    "--flash 2 --requests 0": "--requests: expected a whole number from 1 to 65536, found '0'",
    "--requests 4": "--requests [4]: expected --flash, too; add it, or leave this out",
    "--tp 4": "--tp 4: expected --flash, too",
    "--output /nowhere/at/all": "--output: expected a file in a folder that exists, found '/nowhere/at/all'",
}


@pytest.mark.parametrize("words", WRONG)
def test_wrong_options_are_told_before_a_gpu_is_asked(
    words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(sys, "argv", ["profile_decoder", *words.split()])
    with pytest.raises(SystemExit) as ended:
        profile_decoder.main()
    assert ended.value.code == 2 and WRONG[words] in capsys.readouterr().err


OF_BOTH = {
    "--tp 0": "--tp: invalid choice: 0 (choose from 1, 2, 4, 8)",
    "--tokens 0": "--tokens: expected a whole number from 1 to 65536, found '0'",
    "--output /": "--output: expected a file in a folder that exists, found '/'",
}
OF_A_STEP = OF_BOTH | {"--layers 0": "--layers: expected a whole number from 1 to 43, found '0'"}


@pytest.mark.parametrize(
    ("main", "words", "said"),
    [
        *((hopper_step.main, *one) for one in OF_A_STEP.items()),
        *((hopper_overlap.main, *one) for one in OF_BOTH.items()),
    ],
)
def test_wrong_options_of_hopper_s_steps_are_told_before_a_gpu_is_asked(
    main: Any, words: str, said: str, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(SystemExit) as ended:
        main(words.split())
    assert ended.value.code == 2 and said in capsys.readouterr().err
