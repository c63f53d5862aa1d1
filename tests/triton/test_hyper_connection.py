"""Hyper-connections against the plain torch reference."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from triton.runtime import interpreter

from nvfp4_sgl.errors import OperandError
from nvfp4_sgl.formats.rows import Rows
from nvfp4_sgl.limits import MAX_HC_EPS, MIN_HC_EPS
from nvfp4_sgl.ops import hyper_connection as reference
from nvfp4_sgl.ops.norm import rms_norm
from nvfp4_sgl.triton_kernels.hyper_connection import site as kernels
from nvfp4_sgl.triton_kernels.hyper_connection import tiling as tilings
from nvfp4_sgl.triton_kernels.hyper_connection.site import Site, SiteState
from nvfp4_sgl.triton_kernels.hyper_connection.tiling import Tiling
from nvfp4_sgl.triton_kernels.quantize.quantize import quantize
from tests.triton.support.resources import resources
from tests.triton.support.rows import poisoned_rows, require_quantized

EPS = 1e-6
BF16 = 2.0**-8
"""Unit roundoff."""


def make_site(
    d: int, device: str, *, head: bool = False, normed: bool = True, spread: float = 1.0, iterations: int = 3
) -> Site:
    """Coefficients as they come: products of unit size, ``spread`` times that before sigmoid and softmax."""
    rows = 4 if head else 24
    return Site(
        fn=kernels.split_fn((torch.randn(rows, 4 * d) * (4 * d) ** -0.5).to(device)),
        base=torch.randn(rows).to(device),
        scale=(spread * (0.5 + torch.rand(1 if head else 3))).to(device),
        hc_eps=EPS,
        norm_eps=EPS,
        norm=(1 + 0.1 * torch.randn(d)).bfloat16().to(device) if normed else None,
        iterations=0 if head else iterations,
    )


def make_streams(tokens: int, d: int, device: str) -> Tensor:
    """Rows of very different size, a few outliers in each."""
    x = torch.randn(tokens, 4, d) * torch.logspace(-3, 3, tokens).view(-1, 1, 1)
    x[:, :, :: max(d // 5, 1)] *= 50
    return x.bfloat16().to(device)


def poisoned_state(tokens: int, d: int, device: str) -> SiteState:
    state = SiteState.allocate(tokens, d, device)
    for tensor in (state.x, state.post, state.comb, state.workspace):
        tensor.fill_(float("nan"))
    return state


def expected_entry(site: Site, streams: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Collapsed row in the exact arithmetic of fp64, rounded; post; comb."""
    exact = {"fn": site.fn.double().sum(0), "base": site.base.double(), "scale": site.scale.double()}
    flat = streams.double().flatten(1)
    mix = flat @ exact["fn"].t() * (flat.square().mean(-1, keepdim=True) + EPS).rsqrt()
    pre = torch.sigmoid(mix[:, :4] * exact["scale"][0] + exact["base"][:4]) + EPS
    collapsed = torch.einsum("tk,tkd->td", pre, streams.double())
    if site.is_head:
        return collapsed, None, None
    post = 2 * torch.sigmoid(mix[:, 4:8] * exact["scale"][1] + exact["base"][4:8])
    logits = (mix[:, 8:] * exact["scale"][2] + exact["base"][8:]).view(-1, 4, 4)
    return collapsed, post, reference.sinkhorn(logits, site.iterations, EPS)


def check_entry(site: Site, streams: Tensor, state: SiteState) -> None:
    collapsed, post, comb = expected_entry(site, streams)
    if site.norm is not None:
        # Three roundings: of the collapsed element, of the row's mean square where one element makes most of it (the
        # norm sees the rounded row), and of the result.
        scale = (collapsed.square().mean(-1, keepdim=True) + EPS).rsqrt() * site.norm.double()
        collapsed, allowed = collapsed * scale, 3.2 * BF16
    else:
        allowed = 1.01 * BF16
    size = streams.double().abs().sum(1)
    if site.norm is not None:
        size = size * scale.abs()
    error = (state.x.double() - collapsed).abs()
    assert bool((error <= collapsed.abs() * allowed + size * 1e-5).all())
    if post is not None and comb is not None:
        torch.testing.assert_close(state.post.double(), post, rtol=0, atol=1e-5)
        torch.testing.assert_close(state.comb.double(), comb, rtol=0, atol=1e-5)


SHAPES = [
    (1, 64),
    (3, 200),
    (17, 40),
    pytest.param(1, 7168, marks=pytest.mark.gpu),
    pytest.param(256, 4096, marks=pytest.mark.gpu),
    pytest.param(2049, 4096, marks=pytest.mark.gpu),
    pytest.param(8192, 7168, marks=pytest.mark.gpu),
]


@pytest.mark.parametrize("head", [False, True])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(("tokens", "d"), SHAPES)
def test_pre(tokens: int, d: int, normed: bool, head: bool, device: str) -> None:
    torch.manual_seed(tokens)
    site, streams = make_site(d, device, head=head, normed=normed), make_streams(tokens, d, device)
    state = poisoned_state(tokens, d, device)
    kernels.hyper_connection_pre(site, streams, state)
    check_entry(site, streams, state)
    assert not state.semaphores.any()
    if head:
        assert state.post.isnan().all() and state.comb.isnan().all()


def test_the_weight_is_the_sum_of_its_parts(device: str) -> None:
    fn = (torch.randn(24, 256) * torch.logspace(-20, 5, 256)).to(device)
    parts = kernels.split_fn(fn)
    assert torch.equal(parts.float().sum(0), fn) and torch.equal(parts.double().sum(0), fn.double())


MANY = Tiling(tokens=16, columns=16, span=16, programs=6, ahead=5, collapsed=4, balanced=8)
"""Blocks of many programs each, in tokens as few as the interpreter can do: the last block has 6 of 16 tokens."""
MANY_TOKENS, MANY_WIDTH = 38, 40


@pytest.fixture
def many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tilings, "TILINGS", ((None, MANY),))
    monkeypatch.setattr(tilings, "MAX_WAITING_WITHOUT_TICKETS", 3)


@pytest.fixture(params=[False, True], ids=["", "backwards"])
def order(request: pytest.FixtureRequest, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The order in which a launch's programs run."""
    if device == "cuda":
        pytest.skip("a GPU's order is its own")
    builder, forwards = interpreter.interpreter_builder, interpreter.InterpreterBuilder.set_grid_idx

    def backwards(x: int, y: int, z: int) -> None:
        forwards(builder, *(size - 1 - i for size, i in zip(builder.grid_dim, (x, y, z), strict=True)))

    if request.param:
        monkeypatch.setattr(builder, "set_grid_idx", backwards)


@pytest.mark.parametrize("head", [False, True])
@pytest.mark.usefixtures("many")
def test_many_tokens(head: bool, device: str) -> None:
    """Several rows a program, followers among the mixers of later blocks, tickets."""
    tokens, d = MANY_TOKENS, MANY_WIDTH
    first, second = make_site(d, device), make_site(d, device, head=head)
    streams, output = make_streams(tokens, d, device), torch.randn(tokens, d).to(device, torch.bfloat16)
    state = poisoned_state(tokens, d, device)
    kernels.hyper_connection_pre(first, streams, state)
    check_entry(first, streams, state)
    post, comb, before = state.post.clone(), state.comb.clone(), streams.clone()
    kernels.hyper_connection_next(second, output, streams, state)
    check_post(streams, output, before, post, comb)
    check_entry(second, streams, state)


def test_more_splits_than_a_balancer_adds_at_once(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tiling = replace(MANY, balanced=16)
    monkeypatch.setattr(tilings, "TILINGS", ((None, tiling),))
    tokens, d = 19, 320
    assert tiling.splits(tokens, d)[0] > 256 // tiling.balanced
    site, streams = make_site(d, device), make_streams(tokens, d, device)
    state = poisoned_state(tokens, d, device)
    kernels.hyper_connection_pre(site, streams, state)
    check_entry(site, streams, state)


@pytest.mark.usefixtures("many", "order")
def test_order_of_programs(device: str) -> None:
    """Whoever comes first, tickets give the tasks of mixers out before those of the programs that wait for them."""
    torch.manual_seed(0)
    site, streams = make_site(MANY_WIDTH, device), make_streams(MANY_TOKENS, MANY_WIDTH, device)
    state = poisoned_state(MANY_TOKENS, MANY_WIDTH, device)
    for _ in range(2):
        kernels.hyper_connection_pre(site, streams, state)
        check_entry(site, streams, state)
        assert not state.semaphores.any()


def test_pre_agrees_with_the_op(device: str) -> None:
    site, streams = make_site(64, device, iterations=20), make_streams(5, 64, device)
    state = poisoned_state(5, 64, device)
    kernels.hyper_connection_pre(site, streams, state)
    collapsed, post, comb = reference.hyper_connection_pre(
        streams.cpu(),
        site.fn.float().sum(0).cpu(),
        site.base.cpu(),
        site.scale.cpu(),
        iterations=20,
        hc_eps=EPS,
        norm_eps=EPS,
    )
    torch.testing.assert_close(state.x.cpu(), rms_norm(collapsed, site.norm.cpu(), EPS), rtol=2 * BF16, atol=1e-6)
    torch.testing.assert_close((state.post.cpu(), state.comb.cpu()), (post, comb), rtol=0, atol=1e-5)


@pytest.mark.parametrize("size", [0.0, 1e-12, 1e12])
def test_streams_of_any_size(size: float, device: str) -> None:
    """All zeros and what would overflow in bf16 when squared stay finite."""
    site, streams = make_site(64, device), make_streams(2, 64, device).mul_(size)
    state = poisoned_state(2, 64, device)
    kernels.hyper_connection_pre(site, streams, state)
    check_entry(site, streams, state)
    assert state.x.isfinite().all()


def test_sinkhorn_far_from_uniform(device: str) -> None:
    """Logits so far apart that most entries of the softmax are nothing but ``hc_eps``."""
    site, streams = make_site(64, device, spread=40.0, iterations=20), make_streams(6, 64, device)
    state = poisoned_state(6, 64, device)
    kernels.hyper_connection_pre(site, streams, state)
    _, _, comb = expected_entry(site, streams)
    assert comb is not None and comb.min() < 1e-4
    # Logits of size 100 carry an error of their own.
    torch.testing.assert_close(state.comb.double(), comb, rtol=0, atol=1e-3)
    torch.testing.assert_close(state.comb.sum(1), torch.ones(6, 4, device=device), rtol=0, atol=1e-5)


@pytest.mark.parametrize("tiling", [None, MANY], ids=["a token a program", "a token a lane"])
@pytest.mark.parametrize("iterations", [1, 20, 320])
@pytest.mark.parametrize("eps", [MIN_HC_EPS, EPS, 1e-2, MAX_HC_EPS])
@pytest.mark.parametrize("low", [0.0, -12.0, -100.0])
def test_sinkhorn_of_entries_that_are_the_smallest(
    low: float, eps: float, iterations: int, tiling: Tiling | None, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows and columns without a large entry of their own, so that divisors run far apart, to the last bits.

    ``fn`` is zero, so that logits are exact.
    """
    if tiling is not None:
        monkeypatch.setattr(tilings, "TILINGS", ((None, tiling),))
    torch.manual_seed(iterations)
    streams = make_streams(2, 64, device)
    for low_share in (0.3, 0.5, 0.8):
        logits = torch.where(torch.rand(16) < low_share, low, 0.0) + 0.5 * torch.randn(16)
        site = make_site(64, device, iterations=iterations)
        site = replace(site, hc_eps=eps, fn=torch.zeros_like(site.fn), base=torch.cat([torch.randn(8), logits]))
        site = replace(site, base=site.base.to(device))
        state = poisoned_state(2, 64, device)
        kernels.hyper_connection_pre(site, streams, state)
        comb = reference.sinkhorn(site.base[8:].double().view(1, 4, 4), iterations, eps)
        torch.testing.assert_close(state.comb.double(), comb.expand(2, 4, 4), rtol=0, atol=2e-6)
        post = 2 * torch.sigmoid(site.base[4:8].double())
        torch.testing.assert_close(state.post.double(), post.expand(2, 4), rtol=0, atol=2e-6)


FAR = 1e30
EXTREME = {
    "equal": torch.zeros(4, 4),
    "equal and large": torch.full((4, 4), FAR),
    "a permutation": FAR * torch.eye(4).roll(1, 0),
    "all but a permutation": -FAR * torch.eye(4),
    "one column": FAR * torch.eye(4)[0].expand(4, 4),
    "three rows in a column": FAR * torch.eye(4)[[0, 0, 0, 1]],
    "a triangle": FAR * torch.ones(4, 4).triu(),
    "steps": 100 * torch.arange(16.0).view(4, 4),
}
"""Logits of *comb*."""


@pytest.mark.parametrize("tiling", [None, MANY], ids=["a token a program", "a token a lane"])
@pytest.mark.parametrize("eps", [MIN_HC_EPS, MAX_HC_EPS])
@pytest.mark.parametrize("logits", EXTREME)
def test_logits_as_far_apart_as_they_can_be(
    logits: str, eps: float, tiling: Tiling | None, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if tiling is not None:
        monkeypatch.setattr(tilings, "TILINGS", ((None, tiling),))
    site, ends = make_site(64, device, iterations=20), torch.tensor([FAR, -FAR, 0.0, -90.0])
    base = torch.cat([ends, ends, EXTREME[logits].flatten()]).to(device)
    site = replace(site, hc_eps=eps, fn=torch.zeros_like(site.fn), base=base)
    state = poisoned_state(1, 64, device)
    kernels.hyper_connection_pre(site, make_streams(1, 64, device), state)
    comb = reference.sinkhorn(base[8:].double().view(1, 4, 4), 20, eps)
    torch.testing.assert_close(state.comb.double(), comb, rtol=0, atol=2e-6)
    torch.testing.assert_close(state.post.double(), 2 * torch.sigmoid(base[4:8].double())[None], rtol=0, atol=2e-6)
    assert state.x.isfinite().all()


@pytest.mark.parametrize("tiling", [None, MANY], ids=["a token a program", "a token a lane"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_bad_stream_stays_in_its_token(
    value: float, tiling: Tiling | None, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if tiling is not None:
        monkeypatch.setattr(tilings, "TILINGS", ((None, tiling),))
    site, streams = make_site(64, device, iterations=20), make_streams(5, 64, device)
    good, state = poisoned_state(5, 64, device), poisoned_state(5, 64, device)
    kernels.hyper_connection_pre(site, streams, good)
    streams[2, 1, 7] = value
    kernels.hyper_connection_pre(site, streams, state)
    for name in ("x", "post", "comb"):
        found, expected = getattr(state, name), getattr(good, name)
        assert not found[2].isfinite().all(), name
        found[2] = expected[2]
        assert torch.equal(found, expected), name


@pytest.mark.parametrize("output_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("tokens", "d"), SHAPES)
def test_post(tokens: int, d: int, output_dtype: torch.dtype, device: str) -> None:
    streams, output = make_streams(tokens, d, device), torch.randn(tokens, d).to(device, output_dtype)
    post, comb = torch.rand(tokens, 4).to(device) * 2, torch.rand(tokens, 4, 4).to(device)
    out = torch.full_like(streams, float("nan"))
    kernels.hyper_connection_post(output, streams, post, comb, out=out)
    check_post(out, output, streams, post, comb)
    in_place = streams.clone()
    kernels.hyper_connection_post(output, in_place, post, comb, out=in_place)
    assert torch.equal(in_place, out)


def exact_post(output: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    return post.unsqueeze(2) * output.unsqueeze(1) + torch.einsum("tjk,tjd->tkd", comb, streams)


def check_post(out: Tensor, output: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> None:
    arguments = [tensor.double() for tensor in (output, streams, post, comb)]
    exact = exact_post(*arguments)
    size = exact_post(*(tensor.abs() for tensor in arguments))
    assert bool(((out.double() - exact).abs() <= exact.abs() * BF16 + size * 2.0**-21).all())


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("head", [False, True])
@pytest.mark.parametrize(("tokens", "d"), SHAPES)
def test_next_is_post_and_pre(tokens: int, d: int, head: bool, in_place: bool, device: str) -> None:
    torch.manual_seed(tokens)
    first, second = make_site(d, device), make_site(d, device, head=head)
    streams, output = make_streams(tokens, d, device), torch.randn(tokens, d).to(device, torch.bfloat16)
    state = poisoned_state(tokens, d, device)
    kernels.hyper_connection_pre(first, streams, state)
    post, comb, before = state.post.clone(), state.comb.clone(), streams.clone()
    out = streams if in_place else torch.full_like(streams, float("nan"))
    kernels.hyper_connection_next(second, output, streams, state, out=out)
    check_post(out, output, before, post, comb)
    check_entry(second, out, state)
    if not in_place:
        assert torch.equal(streams, before)


@pytest.mark.parametrize("token_tile", [8, 128])
@pytest.mark.parametrize(("tokens", "d"), [(1, 64), (3, 192), (17, 64)])
def test_quantized_as_the_reference_does(tokens: int, d: int, token_tile: int, device: str) -> None:
    site, streams = make_site(d, device), make_streams(tokens, d, device)
    out = poisoned_rows(tokens, d, device, token_tile)
    state = replace(poisoned_state(tokens, d, device), quantized=out)
    kernels.hyper_connection_pre(site, streams, state)
    check_entry(site, streams, state)
    require_quantized(out, state.x)


@pytest.mark.usefixtures("many")
def test_many_tokens_quantized(device: str) -> None:
    site, streams = make_site(64, device), make_streams(MANY_TOKENS, 64, device)
    state = replace(poisoned_state(MANY_TOKENS, 64, device), quantized=poisoned_rows(MANY_TOKENS, 64, device, 16))
    kernels.hyper_connection_pre(site, streams, state)
    assert state.quantized is not None
    require_quantized(state.quantized, state.x)


def test_a_state_for_more_tokens_serves_fewer(device: str) -> None:
    site = make_site(64, device)
    large = replace(poisoned_state(18, 64, device), quantized=Rows.allocate(18, 64, 8, device))
    for tokens in (18, 16, 1, 0):
        streams = make_streams(tokens, 64, device)
        state = large.first(tokens)
        kernels.hyper_connection_pre(site, streams, state)
        check_entry(site, streams, state)
        if tokens and state.quantized is not None:
            rows = poisoned_rows(tokens, 64, device, 8)
            quantize(state.x, rows)
            assert torch.equal(state.quantized.codes, rows.codes) and torch.equal(state.quantized.scale, rows.scale)


@pytest.mark.parametrize("d", [64, 4096, 7168])
def test_workspace_for_more_tokens_is_enough_for_fewer(d: int) -> None:
    sizes = (*range(1, 600), 2048, 2049, 8192, 65536)
    used = [(tilings.choose_tiling(tokens).splits(tokens, d)[0] + 1) * tokens * 32 for tokens in sizes]
    blocks = [1 + -(-tokens // tilings.choose_tiling(tokens).tokens) for tokens in sizes]
    given = [tilings.workspace_size(tokens, d) for tokens in sizes]
    semaphores = [tilings.semaphores_size(tokens) for tokens in sizes]
    assert all(needed <= room for needed, room in zip(used + blocks, given + semaphores, strict=True))
    assert given == sorted(given) and semaphores == sorted(semaphores)


@pytest.mark.parametrize("d", [64, 200, 4096, 7168])
def test_splits_cover_a_row(d: int) -> None:
    for tokens in (*range(1, 600), 2048, 2049, 8192):
        tiling = tilings.choose_tiling(tokens)
        splits, length = tiling.splits(tokens, d)
        assert (splits - 1) * length < d <= splits * length and length % tiling.columns == 0
        assert length <= tiling.span


def test_same_input_same_bits(device: str) -> None:
    site, streams = make_site(96, device), make_streams(9, 96, device)
    states = [poisoned_state(9, 96, device) for _ in range(2)]
    for state in states:
        kernels.hyper_connection_pre(site, streams, state)
    assert torch.equal(states[0].x, states[1].x) and torch.equal(states[0].comb, states[1].comb)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [3, 300])
def test_in_a_cuda_graph(tokens: int, device: str) -> None:
    """Capture refuses what waits for the device or allocates behind its back; a replay sees new data."""
    site, streams = make_site(4096, device), make_streams(tokens, 4096, device)
    output = torch.randn(tokens, 4096, device=device, dtype=torch.bfloat16)
    out, state = torch.empty_like(streams), poisoned_state(tokens, 4096, device)
    kernels.hyper_connection_pre(site, streams, state)  # compiles
    kernels.hyper_connection_next(site, output, streams, state, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernels.hyper_connection_pre(site, streams, state)
        kernels.hyper_connection_next(site, output, streams, state, out=out)
    streams.copy_(make_streams(tokens, 4096, device))
    graph.replay()
    check_entry(site, out, state)


@pytest.mark.parametrize(
    "damage",
    [
        lambda site, state: (replace(site, fn=site.fn[:, :23].contiguous()), state),
        lambda site, state: (replace(site, fn=site.fn[0]), state),
        lambda site, state: (replace(site, fn=site.fn.float()), state),
        lambda site, state: (replace(site, scale=site.scale[:1]), state),
        lambda site, state: (replace(site, norm=site.norm[1:]), state),
        lambda site, state: (replace(site, iterations=0), state),
        lambda site, state: (replace(site, hc_eps=MIN_HC_EPS / 2), state),
        lambda site, state: (replace(site, hc_eps=MAX_HC_EPS * 2), state),
        lambda site, state: (replace(site, hc_eps=float("nan")), state),
        lambda site, state: (site, replace(state, workspace=state.workspace[:-1])),
        lambda site, state: (site, replace(state, semaphores=state.semaphores[:-1])),
        lambda site, state: (site, replace(state, semaphores=state.semaphores.float())),
        lambda site, state: (site, replace(state, x=state.x.float())),
        lambda site, state: (site, state.first(2)),
        lambda site, state: (site, replace(state, quantized=Rows.allocate(2, 64, 8, state.x.device))),
    ],
)
def test_what_no_kernel_takes_is_refused(damage, device: str) -> None:
    site, state = damage(make_site(64, device), SiteState.allocate(3, 64, device))
    with pytest.raises(OperandError, match="hyper_connection_pre: "):
        kernels.hyper_connection_pre(site, make_streams(3, 64, device), state)


def launches() -> None:
    for tokens, d in ((1, 7168), (32, 7168), (64, 7168), (8192, 7168)):
        site = make_site(64, "cpu")
        site = replace(
            site, fn=torch.empty(3, 24, 4 * d, dtype=torch.bfloat16), norm=torch.empty(d, dtype=torch.bfloat16)
        )
        site = replace(site, **{name: getattr(site, name).to("meta") for name in ("fn", "base", "scale", "norm")})
        state = SiteState.allocate(tokens, d, "meta")
        streams = torch.empty(tokens, 4, d, dtype=torch.bfloat16, device="meta")
        for quantized in (None, Rows.allocate(tokens, d, 128, "meta")):
            kernels.hyper_connection_next(site, state.x, streams, replace(state, quantized=quantized))
    kernels.hyper_connection_post(state.x, streams, state.post, state.comb)


def test_nothing_spills() -> None:
    for usage in resources(__name__):
        usage.require_no_spills()
