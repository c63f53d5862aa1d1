"""Routing and permutation against plain Python and torch."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from nvfp4_sgl.errors import OperandError
from nvfp4_sgl.triton_kernels.experts import routing
from nvfp4_sgl.triton_kernels.experts.permutation import SINGLE_PROGRAM_MAX_TOKENS, Routes, padded_rows
from nvfp4_sgl.triton_kernels.experts.routing import route_hash, route_topk
from tests.triton.support.interpreter import run_backwards
from tests.triton.support.launches import Launches
from tests.triton.support.resources import resources

SCALING = 2.5


def exact_scores(logits: Tensor) -> Tensor:
    return F.softplus(logits.double(), threshold=700).sqrt()


def poisoned(tokens: int, topk: int, groups: int, tile: int, device: str) -> Routes:
    out = Routes.allocate(tokens, topk, groups, tile, device)
    for tensor in (out.experts, out.weights, out.source_row, out.destination, out.offsets, out.counts, out.starts):
        tensor.fill_(-77)
    return out


def by_scores(logits: Tensor, bias: Tensor, topk: int, *, shared: bool = False, scaling: float = SCALING) -> Routes:
    """Routed and permuted, with a group to spare."""
    out = poisoned(len(logits), topk + shared, len(bias) + shared + 1, 1, str(logits.device))
    semaphore = torch.zeros(1, dtype=torch.int32, device=logits.device)
    route_topk(logits, bias, scaling, out, semaphore, shared_expert=shared)
    check_rows(out)
    assert semaphore.item() == 0
    return out


def by_table(
    logits: Tensor, table: Tensor, ids: Tensor, *, shared: bool = False, groups: int = 0, tile: int = 1
) -> Routes:
    tokens, count = logits.shape
    out = poisoned(tokens, table.shape[1] + shared, groups or count + shared, tile, str(logits.device))
    semaphore = torch.zeros(1, dtype=torch.int32, device=logits.device)
    route_hash(logits, table, ids, SCALING, out, semaphore, shared_expert=shared)
    check_rows(out)
    assert semaphore.item() == 0
    return out


def check_weights(logits: Tensor, experts: Tensor, weights: Tensor) -> None:
    chosen = exact_scores(logits).gather(1, experts.long())
    expected = chosen / (chosen.sum(1, keepdim=True) + 1e-20) * SCALING
    torch.testing.assert_close(weights.double(), expected, rtol=4e-6, atol=1e-19)


def check_rows(out: Routes) -> None:
    """The permutation of whatever experts were chosen."""
    experts, tile = out.experts.tolist(), out.tile
    source, destination = [-1] * len(out.source_row), [[-1] * len(chosen) for chosen in experts]
    visits: list[list[tuple[int, int]]] = [[] for _ in range(out.groups)]
    for token, chosen in enumerate(experts):
        for k, expert in enumerate(chosen):
            if 0 <= expert < out.groups:
                visits[expert].append((token, k))
    offsets, begin = [], 0
    for of_group in visits:
        for row, (token, k) in enumerate(of_group, begin):
            source[row], destination[token][k] = token, row
        offsets.append(begin)
        begin += -(-len(of_group) // tile) * tile
    assert begin <= len(source)
    assert out.counts.tolist() == [len(of_group) for of_group in visits]
    assert out.offsets.tolist() == offsets
    assert out.destination.tolist() == destination
    assert out.source_row.tolist() == source


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("tokens", "count", "topk"),
    [
        (1, 256, 6),
        (3, 384, 6),
        (2, 5, 5),
        (5, 7, 1),
        (19, 512, 6),
        (259, 9, 2),
        pytest.param(8192, 384, 6, marks=pytest.mark.gpu),
    ],
)
@pytest.mark.parametrize("shared", [False, True])
def test_topk(tokens: int, count: int, topk: int, shared: bool, dtype: torch.dtype, device: str) -> None:
    torch.manual_seed(count)
    logits = (torch.randn(tokens, count) * 3).to(device, dtype)
    bias = torch.randn(count).to(device)
    out = by_scores(logits, bias, topk, shared=shared)
    experts, weights = out.experts, out.weights
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
    out = by_scores(torch.zeros(2, 9, device=device), torch.zeros(9, device=device), 3, scaling=1.5)
    assert out.experts.tolist() == [[0, 1, 2]] * 2
    torch.testing.assert_close(out.weights, torch.full_like(out.weights, 0.5))


def test_negative_biases_order_as_well(device: str) -> None:
    bias = torch.tensor([-3.0, -1.0, -2.0, -9.0], device=device)
    assert by_scores(torch.zeros(1, 4, device=device), bias, 4).experts.tolist() == [[1, 2, 0, 3]]


def test_scores_over_all_magnitudes(device: str) -> None:
    """Where softplus is tiny, exp(z), and where it is z."""
    values = torch.cat([torch.linspace(-80, 80, 161), torch.tensor([1e-6, -1e-6, 0.0, 19.99, 20.01, 1e30])])
    logits = torch.stack([values, torch.zeros_like(values)], 1).to(device)
    out = by_scores(logits, torch.zeros(2, device=device), 2)
    check_weights(logits, out.experts, out.weights)


def test_weights_of_chosen_experts_whose_scores_are_tiny(device: str) -> None:
    """Their sum is not far above what keeps a division by 0 away."""
    logits = torch.tensor([[-60.0, -62.0, -90.0]], device=device)
    out = by_scores(logits, torch.zeros(3, device=device), 2)
    assert out.experts.tolist() == [[0, 1]]
    check_weights(logits, out.experts, out.weights)


def test_a_slice_of_a_wider_matrix(device: str) -> None:
    wide = torch.randn(4, 40, device=device)
    bias = torch.randn(16, device=device)
    ours, theirs = by_scores(wide[:, 8:24], bias, 3), by_scores(wide[:, 8:24].contiguous(), bias, 3)
    assert torch.equal(ours.experts, theirs.experts) and torch.equal(ours.weights, theirs.weights)


@pytest.mark.parametrize("ids", [torch.int32, torch.int64])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(("tokens", "topk"), [(1, 6), (35, 6), (4, 1)])
def test_hash(tokens: int, topk: int, shared: bool, ids: torch.dtype, device: str) -> None:
    torch.manual_seed(tokens)
    logits = (torch.randn(tokens, 32) * 4).to(device)
    table = torch.stack([torch.randperm(32)[:topk] for _ in range(50)]).to(device, ids)
    token_ids = torch.randint(50, (tokens,)).to(device, ids)
    out = by_table(logits, table, token_ids, shared=shared)
    experts, weights = out.experts, out.weights
    if shared:
        assert bool((experts[:, -1] == 32).all()) and bool((weights[:, -1] == 1).all())
        experts, weights = experts[:, :-1], weights[:, :-1]
    assert torch.equal(experts.long(), table[token_ids.long()].long())
    check_weights(logits, experts, weights)


def test_an_unknown_token_is_not_routed(device: str) -> None:
    """Token 2 is the first behind the table, where memory holds a row of valid experts; −1 has one before it."""
    table = torch.tensor([[3, 2], [0, 1], [1, 9], [2, 3]], device=device)[1:3]
    logits, ids = torch.zeros(3, 4, device=device), torch.tensor([2, 1, -1], device=device)
    out = by_table(logits, table, ids, groups=10)
    assert out.experts.tolist() == [[-1, -1], [1, -1], [-1, -1]]
    assert out.weights.tolist() == [[0, 0], [SCALING, 0], [0, 0]]


@pytest.mark.parametrize("tokens", [1, 4, 19, SINGLE_PROGRAM_MAX_TOKENS + 40])
@pytest.mark.parametrize("shared", [False, True])
def test_padding_visits_no_group(tokens: int, shared: bool, device: str) -> None:
    """Tokens that write page 0: neither by scores nor by table, the shared expert included; the others as ever."""
    torch.manual_seed(tokens)
    logits, bias = (torch.randn(tokens, 12) * 3).to(device), torch.randn(12).to(device)
    table = torch.stack([torch.randperm(12)[:3] for _ in range(50)]).int().to(device)
    ids, slots = torch.randint(50, (tokens,)).to(device), torch.randint(256, 9999, (tokens,)).int()
    slots[torch.rand(tokens) < 0.4], slots[0], slots[-1:] = 255, 256, 0
    is_padding = (slots < 256).to(device)
    semaphore = torch.zeros(1, dtype=torch.int32, device=device)
    for route in (partial(route_topk, logits, bias), partial(route_hash, logits, table, ids)):
        found, expected = (poisoned(tokens, 3 + shared, 12 + shared, 8, device) for _ in range(2))
        route(SCALING, found, semaphore, shared_expert=shared, window_write=slots.to(device))
        route(SCALING, expected, semaphore, shared_expert=shared)
        check_rows(found)
        assert torch.equal(found.experts, expected.experts.masked_fill(is_padding[:, None], -1))
        assert torch.equal(found.weights, expected.weights.masked_fill(is_padding[:, None], 0))


def some_experts(tokens: int, topk: int, count: int) -> Tensor:
    """Distinct for each token; low numbers far more often."""
    popularity = torch.logspace(0, -2, count).expand(tokens, count)
    return torch.multinomial(popularity, topk) if tokens else torch.zeros(0, topk, dtype=torch.int64)


def check_permutation(experts: Tensor, count: int, tile: int, device: str, *, groups: int = 0) -> None:
    """Check the permutation for given experts, by a table that has them for tokens 0, 1, 2, ..."""
    tokens = len(experts)
    logits, ids = torch.zeros(tokens, count, device=device), torch.arange(tokens, device=device)
    out = by_table(logits, experts.to(device), ids, groups=groups, tile=tile)
    assert torch.equal(out.experts.cpu().long(), torch.where((experts < 0) | (experts >= count), -1, experts))


@pytest.mark.parametrize(
    ("tokens", "topk", "count", "tile"),
    [
        (1, 6, 256, 8),
        (1, 7, 385, 128),
        (1, 7, 7, 1),
        (1, 8, 10, 16),
        (1, 9, 12, 8),
        (4, 7, 258, 1),
        (5, 7, 258, 1),
        (16, 6, 20, 16),
        (17, 3, 5, 8),
        (64, 7, 385, 1),
        (65, 7, 9, 128),
        (256, 7, 258, 1),
        (0, 6, 8, 16),
    ],
)
def test_permutation_of_few_pairs(tokens: int, topk: int, count: int, tile: int, device: str) -> None:
    torch.manual_seed(tokens)
    assert Routes.allocate(tokens, topk, count, tile, "cpu").is_sorted
    check_permutation(some_experts(tokens, topk, count), count, tile, device)


@pytest.mark.parametrize(
    ("tokens", "topk", "count", "tile"),
    [
        (257, 7, 258, 1),
        (270, 3, 7, 64),
        (250, 9, 385, 128),
        pytest.param(8192, 7, 385, 128, marks=pytest.mark.gpu),
        pytest.param(8191, 7, 258, 1, marks=pytest.mark.gpu),
    ],
)
def test_permutation_of_many_pairs(tokens: int, topk: int, count: int, tile: int, device: str) -> None:
    torch.manual_seed(tokens)
    assert not Routes.allocate(tokens, topk, count, tile, "cpu").is_sorted
    check_permutation(some_experts(tokens, topk, count), count, tile, device)


@pytest.mark.parametrize(
    ("tokens", "wide"), [(1, False), (16, False), (24, False), (32, True), (40, False), (64, True), (256, True)]
)
def test_vectors_of_pairs_only_where_sixteen_divides_them(
    tokens: int, wide: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU one predicate covers a vector's pairs, which the interpreter does not see. Short sorts take none."""
    launches = Launches(routing._route_topk)
    monkeypatch.setattr(routing, "_route_topk", launches)
    semaphore = torch.zeros(1, dtype=torch.int32)
    route_topk(torch.zeros(tokens, 20), torch.zeros(20), SCALING, Routes.allocate(tokens, 7, 20, 8, "cpu"), semaphore)
    assert [one["SIXTEENS"] for one in launches.given] == [wide]


@pytest.mark.parametrize("tokens", [1, 4, 40, SINGLE_PROGRAM_MAX_TOKENS + 40])
def test_all_to_one_expert(tokens: int, device: str) -> None:
    check_permutation(torch.full((tokens, 1), 3), 5, 16, device)


@pytest.mark.parametrize("tokens", [1, 4, 40, SINGLE_PROGRAM_MAX_TOKENS + 40])
def test_an_expert_more_than_once(tokens: int, device: str) -> None:
    check_permutation(torch.randint(3, (tokens, 4)), 5, 4, device)


@pytest.mark.parametrize("tokens", [1, 4, 40, SINGLE_PROGRAM_MAX_TOKENS + 40])
def test_unrouted_pairs_have_no_row(tokens: int, device: str) -> None:
    experts = some_experts(tokens, 2, 6)
    experts[::3, 1], experts[1::5, 0], experts[1::7, 1], experts[-1] = -1, 6, -2, -1
    check_permutation(experts, 6, 8, device)


@pytest.mark.parametrize("tokens", [30, SINGLE_PROGRAM_MAX_TOKENS + 10])
def test_programs_may_run_in_any_order(tokens: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Backwards here: whoever comes last permutes."""
    run_backwards(monkeypatch)
    check_permutation(some_experts(tokens, 3, 10), 10, 8, device)
    by_scores(torch.randn(tokens, 20), torch.randn(20), 3, shared=True)


def test_the_counter_serves_launch_after_launch(device: str) -> None:
    semaphore = torch.zeros(1, dtype=torch.int32, device=device)
    for tokens in (9, 30, 1, 17):
        out = poisoned(tokens, 2, 6, 4, device)
        route_topk(torch.randn(tokens, 6).to(device), torch.zeros(6, device=device), SCALING, out, semaphore)
        check_rows(out)
    assert semaphore.item() == 0


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 8, 64, 256, 512])
def test_in_a_cuda_graph(tokens: int, device: str) -> None:
    """Replayed over experts of very different popularity: nothing about them is fixed at capture."""
    logits, bias = torch.zeros(tokens, 384, device=device), torch.linspace(0, 3, 384, device=device)
    semaphore = torch.zeros(1, dtype=torch.int32, device=device)
    out = Routes.allocate(tokens, 7, 386, 1, device)
    route_topk(logits, bias, SCALING, out, semaphore, shared_expert=True)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        route_topk(logits, bias, SCALING, out, semaphore, shared_expert=True)
    for _ in range(20):
        logits.copy_(torch.randn_like(logits) * 2)
        graph.replay()
        check_rows(out)
    assert semaphore.item() == 0


@pytest.mark.parametrize(("pairs", "groups", "tile"), [(1, 256, 128), (6, 4, 8), (300, 256, 128), (7, 7, 1)])
def test_padded_rows_are_the_worst_case(pairs: int, groups: int, tile: int) -> None:
    """All groups that can have any pairs have one more than whole tiles, and no less would do."""
    counts = [1] * min(pairs, groups)
    left = pairs - len(counts)
    counts[0] += left // tile * tile
    counts[-1] += left % tile
    needed = sum(-(-count // tile) * tile for count in counts)
    rows = padded_rows(pairs, groups, tile)
    assert needed <= rows < needed + tile + tile * (left % tile > 0)


LOGITS, BIAS, TABLE, IDS = torch.ones(2, 8), torch.ones(8), torch.ones(9, 2, dtype=torch.int32), torch.ones(2).int()
OUT, ARRIVALS = Routes.allocate(2, 2, 8, 8, "cpu"), torch.zeros(1, dtype=torch.int32)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: route_topk(LOGITS, BIAS[1:], 1.0, OUT, ARRIVALS), "bias: expected shape"),
        (lambda: route_topk(LOGITS[:, :1], BIAS[:1], 1.0, OUT, ARRIVALS), "topk: expected a value"),
        (lambda: route_topk(torch.ones(2, 513), torch.ones(513), 1.0, OUT, ARRIVALS), "experts .columns of logits"),
        (lambda: route_topk(LOGITS.half(), BIAS, 1.0, OUT, ARRIVALS), "logits: expected dtype"),
        (lambda: route_topk(LOGITS[:1], BIAS, 1.0, OUT, ARRIVALS), "experts: expected shape"),
        (lambda: route_topk(LOGITS, BIAS, 1.0, OUT, ARRIVALS, shared_expert=True), "number of groups: expected"),
        (lambda: route_topk(LOGITS, BIAS, 1.0, OUT, torch.zeros(1)), "semaphore: expected dtype"),
        (lambda: route_topk(LOGITS, BIAS, 1.0, OUT, ARRIVALS[:0]), "semaphore: expected shape"),
        (lambda: route_topk(LOGITS, BIAS, 1.0, replace(OUT, tile=16), ARRIVALS), "source_row: expected shape"),
        (lambda: route_topk(LOGITS, BIAS, 1.0, replace(OUT, tile=0), ARRIVALS), "tile: expected a value"),
        (lambda: route_topk(LOGITS, BIAS, 1.0, replace(OUT, counts=OUT.counts[1:]), ARRIVALS), "counts: expected"),
        (lambda: route_topk(LOGITS, BIAS, 1.0, replace(OUT, weights=OUT.experts), ARRIVALS), "weights: expected dtype"),
        (lambda: route_topk(LOGITS, BIAS, 1.0, replace(OUT, starts=OUT.counts), ARRIVALS), "starts: expected shape"),
        (lambda: route_topk(LOGITS, BIAS, 1.0, OUT, ARRIVALS, window_write=IDS.long()), "window_write: expected dtype"),
        (lambda: route_topk(LOGITS, BIAS, 1.0, OUT, ARRIVALS, window_write=IDS[1:]), "window_write: expected shape"),
        (lambda: route_hash(LOGITS, TABLE, IDS[1:], 1.0, OUT, ARRIVALS), "token_ids: expected shape"),
        (lambda: route_hash(LOGITS, TABLE.float(), IDS, 1.0, OUT, ARRIVALS), "table: expected dtype"),
        (lambda: route_hash(LOGITS, TABLE[:, :1], IDS, 1.0, OUT, ARRIVALS), "table: expected shape"),
    ],
)
def test_what_no_kernel_takes_is_refused(call, message: str) -> None:
    with pytest.raises(OperandError, match=message):
        call()


def launches() -> None:
    count, topk = 384, 6
    semaphore, bias = (torch.empty(n, device="meta", dtype=d) for n, d in ((1, torch.int32), (count, torch.float32)))
    table = torch.empty(100, topk, dtype=torch.int32, device="meta")
    for tokens in (1, 64, 256, 512):
        logits = torch.empty(tokens, count, device="meta")
        out = Routes.allocate(tokens, topk + 1, count + 2, 1 if tokens < 256 else 128, "meta")
        slots = torch.empty(tokens, dtype=torch.int32, device="meta")
        route_topk(logits, bias, SCALING, out, semaphore, shared_expert=True, window_write=slots)
        ids = torch.empty(tokens, dtype=torch.int64, device="meta")
        route_hash(logits, table, ids, SCALING, out, semaphore, shared_expert=True, window_write=slots)


def test_nothing_spills() -> None:
    found = resources(__name__)
    # Of two kernels on two targets: programs wait for one another where one sorts all pairs, of 64 and 256 tokens.
    assert sum(usage.count("atom.global.gpu.acq_rel.add") for usage in found) == 2 * 2 * 2
    for usage in found:
        usage.require_no_spills()
