"""DSpark's chain of guesses against the reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from nvfp4_sgl.errors import OperandError
from nvfp4_sgl.ops import drafts as reference
from nvfp4_sgl.triton_kernels.logits import markov
from nvfp4_sgl.triton_kernels.logits.markov import BLOCK, BLOCK_K, MAX_ROWS, draft_greedily, semaphores_for
from tests.triton.support.interpreter import run_backwards
from tests.triton.support.resources import resources
from tests.triton.test_router_logits import poisoned

SHAPES = [(1, 1, 40, 8), (2, 5, BLOCK, BLOCK_K), (3, 3, 2 * BLOCK + 1, BLOCK_K + 8), (MAX_ROWS + 1, 2, BLOCK + 7, 24)]
"""Requests, steps, tokens of the vocabulary and rank: whole blocks and not, one part and several."""


def some_blocks(
    requests: int, steps: int, width: int, rank: int, device: str, *, integers: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(base, anchor, w1, w2), with outliers, and -inf as masks leave it; integers are summed in any order."""
    generator = torch.Generator().manual_seed(requests + width)
    base, w1, w2 = (
        torch.randn(shape, generator=generator) for shape in ((requests, steps, width), (width, rank), (width, rank))
    )
    if integers:
        base, w1, w2 = (4 * base).round(), w1.round(), w2.round()
    for matrix in (base, w1, w2):
        matrix.flatten()[::97] *= 16
    base[torch.rand(base.shape, generator=generator) < 0.2] = -torch.inf
    anchor = torch.randint(width, (requests, 3), generator=generator)[:, 0]  # a column, as SGLang's are
    return base.to(device), anchor.to(device), w1.bfloat16().to(device), w2.bfloat16().to(device)


def found_by(base: Tensor, anchor: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    semaphores = torch.zeros(semaphores_for(len(base)), dtype=torch.int32, device=base.device)
    before = base.clone()
    with mock.patch.object(Tensor, "new_empty", poisoned):
        tokens = draft_greedily(base, anchor, w1, w2, semaphores)
    assert not semaphores.any() and torch.equal(base.nan_to_num(), before.nan_to_num())
    return tokens


def check_exactly(*given: Tensor) -> Tensor:
    """Of integers: the reference's tokens, the lowest of equal ones."""
    tokens = found_by(*given)
    assert torch.equal(tokens, reference.draft_greedily(*given))
    return tokens


@pytest.mark.parametrize("shape", SHAPES)
def test_integers(shape: tuple[int, int, int, int], device: str) -> None:
    check_exactly(*some_blocks(*shape, device, integers=True))


@pytest.mark.parametrize("shape", SHAPES)
def test_each_token_is_the_likeliest_behind_the_one_before(shape: tuple[int, int, int, int], device: str) -> None:
    """But for sums in another order."""
    base, anchor, w1, w2 = some_blocks(*shape, device)
    tokens = found_by(base, anchor, w1, w2)
    before = torch.cat([anchor[:, None], tokens[:, :-1]], dim=1)
    logits = base.double() + w1[before].double() @ w2.double().t()
    chosen = logits.gather(2, tokens[:, :, None])[:, :, 0]
    scale = w1[before].double().abs() @ w2.double().abs().t()
    assert bool((logits.amax(2) - chosen <= 2.0**-21 * (base.abs().nan_to_num(posinf=0) + scale).amax(2)).all())


def test_rows_that_are_not_finite(device: str) -> None:
    """NaN is passed over, also beside negative logits alone; a row of nothing else gives a token of the vocabulary, and
    the chain goes on.
    """
    base, anchor, w1, w2 = some_blocks(4, 3, BLOCK + 9, 16, device, integers=True)
    base[2] -= 2.0**20
    base[0, 1], base[1, 0], base[2, :, ::2], base[3, 0, 5] = torch.nan, -torch.inf, torch.nan, torch.inf
    tokens = check_exactly(base, anchor, w1, w2)
    assert tokens[0, 1] == tokens[1, 0] == 0 and tokens[3, 0] == 5


def test_anchors_of_failed_requests(device: str) -> None:
    """Their token is none (:data:`nvfp4_sgl.ops.greedy.FAILED`)."""
    base, _, w1, w2 = some_blocks(2, 2, 50, 8, device, integers=True)
    check_exactly(base, torch.tensor([-1, 50], device=device), w1, w2)


def test_nothing_to_guess(device: str) -> None:
    base, anchor, w1, w2 = some_blocks(1, 2, 50, 8, device)
    assert found_by(base[:0], anchor[:0], w1, w2).shape == (0, 2)


def test_parts_of_several_blocks(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last part is shorter; programs may run in any order."""
    monkeypatch.setattr(markov, "MAX_PARTS", 2)
    given = some_blocks(2, 2, 4 * BLOCK + 3, 8, device, integers=True)
    check_exactly(*given)
    if device == "cpu":
        run_backwards(monkeypatch)
        check_exactly(*given)


@pytest.mark.parametrize("tied", [(3, 5), (3, BLOCK + 1), (BLOCK - 1, 2 * BLOCK), (BLOCK + 2, 3 * BLOCK + 1)])
def test_of_equal_logits_the_lowest_token(tied: tuple[int, int], device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one block, in two blocks of a part, and in two parts."""
    monkeypatch.setattr(markov, "MAX_PARTS", 2)
    base, anchor, w1, w2 = some_blocks(2, 2, 4 * BLOCK, 8, device, integers=True)
    base[:], w2[:] = -1, 0
    base[:, :, list(tied)] = 7
    assert bool((check_exactly(base, anchor, w1, w2) == min(tied)).all())


@pytest.mark.gpu
@pytest.mark.parametrize("requests", [1, 16, 33, 48])
def test_whole_vocabularies(requests: int, device: str) -> None:
    """Flash's, eagerly and in a CUDA graph."""
    given = some_blocks(requests, 5, 129280, 256, device, integers=True)
    expected = check_exactly(*given)
    semaphores = torch.zeros(semaphores_for(requests), dtype=torch.int32, device=device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = draft_greedily(*given, semaphores)
    for _ in range(20):
        graph.replay()
        assert torch.equal(found, expected)
    assert not semaphores.any()


BASE, ANCHOR, MATRIX = torch.ones(2, 3, 40), torch.zeros(2).long(), torch.zeros(40, 8).bfloat16()
SEMAPHORES = torch.zeros(1).int()


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: draft_greedily(BASE[0], ANCHOR, MATRIX, MATRIX, SEMAPHORES), "base"),
        (lambda: draft_greedily(BASE.half(), ANCHOR, MATRIX, MATRIX, SEMAPHORES), "base"),
        (lambda: draft_greedily(BASE[:, ::2], ANCHOR, MATRIX, MATRIX, SEMAPHORES), "base"),
        (lambda: draft_greedily(BASE, ANCHOR[:1], MATRIX, MATRIX, SEMAPHORES), "anchor"),
        (lambda: draft_greedily(BASE, ANCHOR.int(), MATRIX, MATRIX, SEMAPHORES), "anchor"),
        (lambda: draft_greedily(BASE, ANCHOR, MATRIX[:39], MATRIX, SEMAPHORES), "w1"),
        (lambda: draft_greedily(BASE, ANCHOR, MATRIX, MATRIX.float(), SEMAPHORES), "w2"),
        (lambda: draft_greedily(BASE, ANCHOR, MATRIX, MATRIX, SEMAPHORES[:0]), "number of semaphores"),
        (lambda: draft_greedily(BASE, ANCHOR, MATRIX, MATRIX, SEMAPHORES.long()), "semaphores"),
    ],
)
def test_what_the_kernel_does_not_take_is_refused(call: Callable[[], Any], named: str) -> None:
    with pytest.raises(OperandError, match=f"draft_greedily: {named}"):
        call()


def launches() -> None:
    for requests, rank in ((1, 256), (48, 512)):
        base, matrix = torch.zeros(requests, 5, 129280), torch.zeros(129280, rank, dtype=torch.bfloat16)
        semaphores = torch.zeros(semaphores_for(requests), dtype=torch.int32)
        draft_greedily(base, torch.zeros(requests, dtype=torch.int64), matrix, matrix, semaphores)


def test_resources() -> None:
    """Tensor cores multiply; loads of ``w2`` are copied 16 bytes at a time; one count a program."""
    found = resources(__name__)
    assert len(found) == 4  # two numbers of rows for two architectures: any step and number of requests is the same
    for usage in found:
        usage.require_no_spills()
        assert usage.early_loads == 0, usage
        assert usage.count("mma.sync") > 0 and usage.count("cp.async.cg.shared.global") > 0, usage
        assert usage.count("atom.global.gpu.acq_rel.add") == 1, usage
