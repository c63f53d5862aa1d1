"""Routing, permutation and the final sum against plain Python and torch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from nvfp4_sgl.triton_kernels import routing
from nvfp4_sgl.triton_kernels.checks import KernelError
from nvfp4_sgl.triton_kernels.routing import Permutation
from tests.triton.support.resources import resources

SCALING = 2.5


def exact_scores(logits: Tensor) -> Tensor:
    return F.softplus(logits.double(), threshold=700).sqrt()


def poisoned(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Tensor:
    return torch.full(shape, -77, dtype=dtype, device=device)


def check_weights(logits: Tensor, experts: Tensor, weights: Tensor) -> None:
    chosen = exact_scores(logits).gather(1, experts.long())
    expected = chosen / (chosen.sum(1, keepdim=True) + 1e-20) * SCALING
    torch.testing.assert_close(weights.double(), expected, rtol=4e-6, atol=1e-19)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("tokens", "count", "topk"),
    [
        (1, 256, 6),
        (3, 384, 6),
        (2, 5, 5),
        (5, 7, 1),
        (259, 9, 2),
        pytest.param(8192, 384, 6, marks=pytest.mark.gpu),
    ],
)
@pytest.mark.parametrize("shared", [False, True])
def test_topk(tokens: int, count: int, topk: int, shared: bool, dtype: torch.dtype, device: str) -> None:
    torch.manual_seed(count)
    logits = (torch.randn(tokens, count) * 3).to(device, dtype)
    bias = torch.randn(count).to(device)
    shape = tokens, topk + shared
    places = {
        "experts": poisoned(shape, torch.int32, device),
        "weights": poisoned(shape, torch.float32, device),
    }
    experts, weights = routing.route_topk(logits, bias, topk, SCALING, shared_expert=shared, **places)
    assert experts is places["experts"] and weights is places["weights"]
    if shared:
        assert bool((experts[:, -1] == count).all()) and bool((weights[:, -1] == 1).all())
        experts, weights = experts[:, :-1], weights[:, :-1]
    biased = exact_scores(logits) + bias.double()
    picked = torch.zeros_like(biased, dtype=torch.bool).scatter_(1, experts.long(), True)
    assert bool((picked.sum(1) == topk).all())
    # Nothing left out is better than anything chosen, but for rounding.
    worst, best = biased.where(picked, torch.inf).amin(1), biased.where(~picked, -torch.inf).amax(1)
    assert bool((worst >= best - 1e-5).all())
    in_order = biased.gather(1, experts.long())
    assert bool((in_order[:, :-1] >= in_order[:, 1:] - 1e-5).all())
    check_weights(logits, experts, weights)


def test_equal_scores_go_to_the_lowest_experts(device: str) -> None:
    experts, weights = routing.route_topk(torch.zeros(2, 9, device=device), torch.zeros(9, device=device), 3, 1.5)
    assert experts.tolist() == [[0, 1, 2]] * 2
    torch.testing.assert_close(weights, torch.full_like(weights, 0.5))


def test_negative_biases_order_as_well(device: str) -> None:
    bias = torch.tensor([-3.0, -1.0, -2.0, -9.0], device=device)
    experts, _ = routing.route_topk(torch.zeros(1, 4, device=device), bias, 4, 1.0)
    assert experts.tolist() == [[1, 2, 0, 3]]


def test_scores_over_all_magnitudes(device: str) -> None:
    """Where softplus is tiny, exp(z), and where it is z."""
    values = torch.cat([torch.linspace(-80, 80, 161), torch.tensor([1e-6, -1e-6, 0.0, 19.99, 20.01, 1e30])])
    logits = torch.stack([values, torch.zeros_like(values)], 1).to(device)
    experts, weights = routing.route_topk(logits, torch.zeros(2, device=device), 2, SCALING)
    check_weights(logits, experts, weights)


def test_a_slice_of_a_wider_matrix(device: str) -> None:
    wide = torch.randn(4, 40, device=device)
    bias = torch.randn(16, device=device)
    ours = routing.route_topk(wide[:, 8:24], bias, 3, 1.0)
    theirs = routing.route_topk(wide[:, 8:24].contiguous(), bias, 3, 1.0)
    assert torch.equal(ours[0], theirs[0]) and torch.equal(ours[1], theirs[1])


@pytest.mark.parametrize("ids", [torch.int32, torch.int64])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(("tokens", "topk"), [(1, 6), (35, 6), (4, 1)])
def test_hash(tokens: int, topk: int, shared: bool, ids: torch.dtype, device: str) -> None:
    torch.manual_seed(tokens)
    logits = (torch.randn(tokens, 32) * 4).to(device)
    table = torch.stack([torch.randperm(32)[:topk] for _ in range(50)]).to(device, ids)
    token_ids = torch.randint(50, (tokens,)).to(device, ids)
    experts, weights = routing.route_hash(logits, table, token_ids, SCALING, shared_expert=shared)
    if shared:
        assert bool((experts[:, -1] == 32).all()) and bool((weights[:, -1] == 1).all())
        experts, weights = experts[:, :-1], weights[:, :-1]
    assert torch.equal(experts.long(), table[token_ids.long()].long())
    check_weights(logits, experts, weights)


def test_an_unknown_token_is_not_routed(device: str) -> None:
    table = torch.tensor([[0, 1], [1, 9]], device=device)
    experts, weights = routing.route_hash(
        torch.zeros(3, 4, device=device), table, torch.tensor([2, 1, -1], device=device), 1.0
    )
    assert experts.tolist() == [[-1, -1], [1, -1], [-1, -1]]
    assert weights.tolist() == [[0, 0], [1, 0], [0, 0]]


def expected_permutation(experts: list[list[int]], count: int, tile: int, rows: int) -> dict[str, object]:
    source, destination = [-1] * rows, [[-1] * len(chosen) for chosen in experts]
    offsets, counts, begin = [], [], 0
    for expert in range(count):
        visits = [(t, k) for t, chosen in enumerate(experts) for k, visited in enumerate(chosen) if visited == expert]
        for row, (token, k) in enumerate(visits, begin):
            source[row], destination[token][k] = token, row
        offsets.append(begin)
        counts.append(len(visits))
        begin += -(-len(visits) // tile) * tile
    assert begin <= rows
    return {"source_row": source, "destination": destination, "offsets": offsets, "counts": counts}


def check_permutation(experts: Tensor, count: int, tile: int, device: str) -> None:
    tokens, topk = experts.shape
    out = Permutation.allocate(tokens, topk, count, tile, device)
    for tensor in vars(out).values():
        tensor.fill_(-77)
    routing.permute(experts.to(device, torch.int32), tile, out)
    expected = expected_permutation(experts.tolist(), count, tile, out.source_row.numel())
    for name, values in expected.items():
        assert getattr(out, name).tolist() == values, name


def some_experts(tokens: int, topk: int, count: int) -> Tensor:
    """Distinct for each token; low numbers far more often."""
    popularity = torch.logspace(0, -2, count).expand(tokens, count)
    return torch.multinomial(popularity, topk)


@pytest.mark.parametrize(
    ("tokens", "topk", "count", "tile"),
    [(1, 6, 256, 8), (1, 7, 385, 128), (11, 6, 20, 16), (33, 3, 5, 8), (85, 6, 9, 1), (0, 6, 8, 16)],
)
def test_permutation_of_few_pairs(tokens: int, topk: int, count: int, tile: int, device: str) -> None:
    torch.manual_seed(tokens)
    check_permutation(some_experts(tokens, topk, count), count, tile, device)


@pytest.mark.parametrize(
    ("tokens", "topk", "count", "tile"),
    [
        (86, 6, 40, 16),
        (171, 3, 7, 64),
        (700, 6, 385, 128),
        pytest.param(8192, 7, 385, 128, marks=pytest.mark.gpu),
    ],
)
def test_permutation_of_many_pairs(tokens: int, topk: int, count: int, tile: int, device: str) -> None:
    torch.manual_seed(tokens)
    check_permutation(some_experts(tokens, topk, count), count, tile, device)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [8, 512])
def test_permutation_in_a_cuda_graph(tokens: int, device: str) -> None:
    """Replayed over experts of very different popularity: nothing about them is fixed at capture."""
    experts = torch.zeros(tokens, 6, dtype=torch.int32, device=device)
    place = Permutation.allocate(tokens, 6, 384, 128, device)
    routing.permute(experts, 128, place)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        routing.permute(experts, 128, place)
    experts.copy_(some_experts(tokens, 6, 384))
    graph.replay()
    expected = expected_permutation(experts.tolist(), 384, 128, len(place.source_row))
    for name, values in expected.items():
        assert getattr(place, name).tolist() == values, name


@pytest.mark.parametrize("tokens", [40, 600])
def test_all_to_one_expert(tokens: int, device: str) -> None:
    check_permutation(torch.full((tokens, 1), 3), 5, 16, device)


@pytest.mark.parametrize("tokens", [40, 300])
def test_unrouted_pairs_have_no_row(tokens: int, device: str) -> None:
    experts = some_experts(tokens, 2, 6)
    experts[::3, 1], experts[1::5, 0], experts[1::7, 1], experts[-1] = -1, 6, -2, -1
    check_permutation(experts, 6, 8, device)


@pytest.mark.parametrize(("pairs", "experts", "tile"), [(1, 256, 128), (6, 4, 8), (300, 256, 128), (7, 7, 1)])
def test_padded_rows_are_the_worst_case(pairs: int, experts: int, tile: int) -> None:
    """All experts that can have any pairs have one more than whole tiles, and no less would do."""
    counts = [1] * min(pairs, experts)
    left = pairs - len(counts)
    counts[0] += left // tile * tile
    counts[-1] += left % tile
    needed = sum(-(-count // tile) * tile for count in counts)
    rows = routing.padded_rows(pairs, experts, tile)
    assert needed <= rows < needed + tile + tile * (left % tile > 0)


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize(("tokens", "d"), [(5, 72), pytest.param(8192, 7168, marks=pytest.mark.gpu)])
def test_finalize(
    tokens: int, d: int, shared: bool, weighted: bool, dtype: torch.dtype, out_dtype: torch.dtype, device: str
) -> None:
    torch.manual_seed(d)
    experts = some_experts(tokens, 6, 16).to(device, torch.int32)
    experts[0, 2] = -1
    place = Permutation.allocate(tokens, 6, 16, 8, device)
    routing.permute(experts, 8, place)
    rows = torch.randn(place.source_row.numel(), d).to(device, dtype)
    rows[place.source_row < 0] = float("nan")  # padding counts for nothing
    weights = torch.rand(tokens, 6).to(device) if weighted else None
    extra = torch.randn(tokens, d).to(device, dtype) if shared else None
    out = torch.full((tokens, d), float("nan"), dtype=out_dtype, device=device)
    assert routing.finalize(rows, place.destination, weights, out, shared=extra) is out
    parts = torch.where(place.destination[..., None] < 0, 0, rows.double()[place.destination.long()])
    parts *= 1 if weights is None else weights.double()[..., None]
    exact, size = parts.sum(1), parts.abs().sum(1)
    if extra is not None:
        exact, size = exact + extra.double(), size + extra.double().abs()
    rounding = 2.0**-8 if out_dtype == torch.bfloat16 else 0
    assert bool(((out.double() - exact).abs() <= exact.abs() * rounding + size * 2.0**-21).all())


LOGITS, BIAS, TABLE, IDS = torch.ones(2, 8), torch.ones(8), torch.ones(9, 2, dtype=torch.int32), torch.ones(2).int()
PLACE = Permutation.allocate(2, 2, 8, 8, "cpu")


@pytest.mark.parametrize(
    "call",
    [
        lambda: routing.route_topk(LOGITS, BIAS, 9, 1.0),
        lambda: routing.route_topk(LOGITS, BIAS[1:], 2, 1.0),
        lambda: routing.route_topk(torch.ones(2, 513), torch.ones(513), 2, 1.0),
        lambda: routing.route_topk(LOGITS.half(), BIAS, 2, 1.0),
        lambda: routing.route_topk(LOGITS, BIAS, 2, 1.0, experts=torch.ones(2, 3, dtype=torch.int32)),
        lambda: routing.route_hash(LOGITS, TABLE, IDS[1:], 1.0),
        lambda: routing.route_hash(LOGITS, TABLE.float(), IDS, 1.0),
        lambda: routing.permute(TABLE[:2], 16, PLACE),
        lambda: routing.permute(TABLE[:3], 8, PLACE),
        lambda: routing.permute(TABLE[:2].long(), 8, PLACE),
        lambda: routing.permute(TABLE[:2], 8, replace(PLACE, counts=PLACE.counts[1:])),
        lambda: routing.finalize(LOGITS, TABLE[:2], None, torch.ones(2, 7)),
        lambda: routing.finalize(LOGITS, TABLE[:2], torch.ones(2, 3), torch.ones(2, 8)),
        lambda: routing.finalize(LOGITS, TABLE[:2], None, torch.ones(2, 8), shared=torch.ones(1, 8)),
    ],
)
def test_what_no_kernel_takes_is_refused(call) -> None:
    with pytest.raises(KernelError):
        call()


def launches() -> None:
    count, topk, d = 384, 6, 7168
    for tokens in (1, 512):
        logits = torch.empty(tokens, count, device="meta")
        bias = torch.empty(count, device="meta")
        experts, weights = routing.route_topk(logits, bias, topk, SCALING, shared_expert=True)
        place = Permutation.allocate(tokens, topk + 1, count + 1, 16, "meta")
        routing.permute(experts, 16, place)
    ids = torch.empty(tokens, dtype=torch.int64, device="meta")
    routing.route_hash(logits, torch.empty(100, topk, dtype=torch.int32, device="meta"), ids, SCALING)
    rows = torch.empty(len(place.source_row), d, dtype=torch.bfloat16, device="meta")
    routing.finalize(rows, place.destination, weights, rows[:tokens])


def test_nothing_spills() -> None:
    for usage in resources(__name__):
        usage.require_no_spills()
