"""launch/bench_verify_attention compiles its kernels before it launches one."""

from __future__ import annotations

import sys

import pytest
import torch

from nvfp4_sgl.triton_kernels import ahead
from nvfp4_sgl.triton_kernels.attention.sparse_attention import Entries
from nvfp4_sgl.triton_kernels.entries.kv_entry import page_bytes
from tests.packaging.checkout import ROOT

sys.path.append(str(ROOT / "launch"))  # its scripts import each other by bare name

from benchmarks import prompt_attention, verify_attention


def test_its_kernels_are_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both of attention, for either kind of layer."""

    def pool(count: int, page_size: int, device: str) -> Entries:
        return Entries(torch.zeros(-(-count // page_size), page_bytes(page_size), dtype=torch.uint8), page_size)

    monkeypatch.setattr(prompt_attention, "pool", pool)
    monkeypatch.setattr(verify_attention, "PASSES", ((2, 6), (2, 3)))
    with ahead.targeting(90, 132):
        found = verify_attention.variants([32], "cpu")
    names = [variant.name for variant in found]
    assert {*names} == {"attend", "attend_block"}
    assert names.count("attend_block") == 2 * 3, "inside requests of six and of three, and across requests"
