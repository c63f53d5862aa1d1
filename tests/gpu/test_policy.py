"""A policy that fixes every choice: what a pass launches then depends on its number of tokens no more."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from nvfp4_sgl.cutedsl_kernels.plan import Pin
from nvfp4_sgl.model.policy import Choice, Policy
from nvfp4_sgl.model.tokens import DividedTokens, EveryToken
from nvfp4_sgl.standalone import Standalone
from nvfp4_sgl.synthetic.tiny import write_tiny
from nvfp4_sgl.triton_kernels.common import chip
from nvfp4_sgl.weights.parallel import SequenceParallel, TensorParallel
from tests.support import native
from tests.support.dry_launches import dry_launches
from tests.support.interpreted import INTERPRETED
from tests.support.reference_gemms import dry_gemms

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="a dry run replaces the interpreter's")

LARGEST = 64
PASSES = (1, 3, 17, 40, 64)
"""Tokens of a pass: between them they take every tiling of a site and both kernels of the router by default."""
CHOSEN = {
    "attend": ("HEADS", "SPLIT", "num_warps", "num_stages"),
    "site_kernel": ("BLOCK_T", "BLOCK_D", "BLOCK_SPLITS", "COLLAPSED", "BALANCED", "STAGES", "num_warps"),
    "_router_logits": (),
    "_router_logits_split": (),
    "_attention_inputs": ("num_warps", "maxnreg"),
}
"""What is chosen, by kernel."""


class Fixed(Policy):
    """All choices are those for the largest pass, in which ranks divide no tokens; it notes what is asked."""

    def tokens(self, choice: Choice, count: int) -> int:
        asked.add(choice)
        return 0 if choice is Choice.DIVISION else LARGEST


asked: set[Choice] = set()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    write_tiny(path, "nvfp4-full", seed=3, num_hidden_layers=3, n_routed_experts=6)
    return path


def chosen(checkpoint: Path, target: str, policy: Policy, tokens: int) -> set[tuple[Any, ...]]:
    """What the kernels and GEMMs of a decode pass of so many tokens are launched with, as far as it is chosen."""
    with dry_gemms(target) as gemms, dry_launches(), torch.no_grad():
        model = Standalone(checkpoint, target=target, requests=LARGEST, capacity=256, policy=policy)
        gemms.keys.clear()
        with dry_launches() as launches:
            model.forward(model.begin({request: [7] for request in range(tokens)}))
        of_kernels = {
            (launch.name, *(dict(launch.variant).get(name) for name in CHOSEN[launch.name]))
            for launch in launches
            if launch.name in CHOSEN
        }
        return of_kernels | {("GEMM", key.shape.token_tile, key.shape.split_k) for key in gemms.keys}


@pytest.mark.parametrize("target", native.GPU_TARGETS)
def test_every_chooser_goes_by_the_policy(target: str, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chip, "processors", lambda device: 132)
    asked.clear()
    by_number = [chosen(checkpoint, target, Policy(), tokens) for tokens in PASSES]
    assert len({frozenset(each) for each in by_number}) > 3 and not asked
    fixed = [chosen(checkpoint, target, Fixed(Pin(8)), tokens) for tokens in PASSES]
    assert fixed == fixed[:1] * len(PASSES)
    assert {name for name, *_ in fixed[0]} == {*CHOSEN, "GEMM"} - {"_router_logits"}
    assert {each[1] for each in fixed[0] if each[0] == "GEMM"} == {8}
    assert asked == set(Choice)


def test_ranks_divide_tokens_as_the_policy_says(checkpoint: Path) -> None:
    ranks = TensorParallel(1, 2, sequence=SequenceParallel(lambda _, part: part[: len(part) // 2], lambda own: own, 16))
    for policy, expected in ((Policy(), DividedTokens), (Fixed(), EveryToken)):
        model = Standalone(checkpoint, parallel=ranks, requests=1, capacity=256, policy=policy)
        assert isinstance(model.decoder.context.tokens(48), expected)
