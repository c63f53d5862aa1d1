"""The parts of launch/bench_prompt_attention that need no GPU: its lists are a plan's, and its results agree."""

from __future__ import annotations

import sys

import pytest
import torch

from nvfp4_sgl.cache.plan import Batch, plan_batch
from tests.packaging.checkout import ROOT

sys.path.append(str(ROOT / "launch"))  # its scripts import each other by bare name

from benchmarks import prompt_attention
from benchmarks.prompt_attention import Prompts, measured


@pytest.mark.parametrize(("requests", "tokens"), [(2, 256), (1, 512)])
def test_lists_are_those_of_a_plan(requests: int, tokens: int) -> None:
    prompts = Prompts(requests, tokens, 128)
    plan = plan_batch(
        Batch(
            starts=torch.zeros(requests, dtype=torch.int64),
            ends=torch.full((requests,), tokens),
            requests=torch.arange(requests),
            full_slots=torch.arange(requests * tokens).view(requests, tokens),
            full_to_swa=torch.arange(requests * tokens),
        ),
        window=prompt_attention.WINDOW,
        ratios=frozenset({128}),
    )
    windows, lengths = prompts.windows("cpu")
    assert torch.equal(windows.long(), plan.swa_slots)
    assert torch.equal(lengths.long(), (plan.swa_slots >= 0).sum(1))
    slots, lengths = prompts.entries("cpu")
    planned = plan.hca_slots[:, : slots.shape[1]]
    assert torch.equal(lengths.long(), (planned >= 0).sum(1))
    seen = torch.arange(planned.shape[1]) < lengths[:, None]
    assert torch.equal(slots[:, : planned.shape[1]][seen].long(), planned[seen])


@pytest.mark.parametrize("heads", [16, 32])
@pytest.mark.parametrize("ratio", [0, 4])
def test_results_agree_and_are_timed(ratio: int, heads: int, device: str) -> None:
    found = dict(measured(Prompts(2, 9, ratio), heads, device, lambda launch: 1.5))
    assert len(found) == 3 and set(found.values()) == {1.5}


def test_what_is_wrong_is_not_timed(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """Three requests that pass for one: the third program has the end of one and the beginning of another."""
    monkeypatch.setattr(Prompts, "owners", lambda prompts, where: torch.zeros(15, dtype=torch.int32, device=where))
    found = dict(measured(Prompts(3, 5, 0), 16, device, lambda launch: 1.5))
    assert found["one query"] == 1.5 and str(found["4 queries"]).startswith("wrong")
