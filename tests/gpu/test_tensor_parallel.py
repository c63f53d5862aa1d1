"""Two and four tensor-parallel ranks of the GPU decoder against one, on a single device (``tests.support.ranks``)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from nvfp4_sgl.errors import ConfigError
from nvfp4_sgl.model.layer import Block
from nvfp4_sgl.model.tokens import ALIGNMENT, tokens_of
from nvfp4_sgl.ops.modes import ActivationMode
from nvfp4_sgl.standalone import Standalone
from nvfp4_sgl.targets.fused import sites, step
from nvfp4_sgl.targets.fused.activations import in_form
from nvfp4_sgl.targets.fused.attention import packed
from nvfp4_sgl.weights.parallel import TensorParallel
from tests.support import native
from tests.support.interpreted import ON_GPU
from tests.support.ranks import Exchange

DEVICE = "cuda" if ON_GPU else "cpu"
LAYERS = range(3)
"""Window-only, CSA and HCA."""
CSA = 1

LAST_PART = 13
"""Tokens of the long prompt that the last rank keeps: fewer than the others, whose parts are aligned."""
CAPACITY = 4
"""Tokens of the largest pass whose parts are pushed: of all but the divided one."""
ORDER_OF_SUMS = 0.01
"""Bound of the median distance of log-probabilities if the parts of four ranks are added in another order."""
TOPK = 4
"""Entries that a token of the long prompt chooses, of up to 7 with two ranks, 15 with four."""
COLLECTIVES = {"all tokens": 2 * len(LAYERS), "divided": 4 * len(LAYERS) + 1 + 2}
"""How many a pass has: sums; if tokens are divided also each site's input, the CSA layer's entries, their numbers."""
SCORES_AT_ONCE = 10 * 64
"""Scores of 10 queries: a rank scores its own in parts, of which the last is not whole."""


ATTENTION = {ActivationMode.W4A16: 0.01, ActivationMode.W4A4: 0.2}
"""Bound of a row's relative error in attention. In ``w4a4`` each rank quantises its part of wo_b's input by a scale of
its own, so that codes fall differently; found on SM100, interpreted: 0.08 to 0.09."""
EXPERTS = 0.01
"""The same of the experts, whose input is whole on each rank, and what lies between quantised by a constant."""


CASES = (*((run, 2) for run in native.runs()), (native.runs()[0], 4))
"""What runs, and how many ranks."""
WHOLE_MODELS = CASES if ON_GPU else (CASES[0], CASES[-2])
"""Interpreted, those whose whole model runs unless ``--full`` asks for the others, too: of two ranks, Hopper in
its own mode and SM100. What the others lack is the sum of each sublayer's parts, which is compared in every case."""


def passes(size: int) -> tuple[dict[int, list[int]], ...]:
    """Tokens by request: a short prompt, a decode step that closes a ratio-4 window, a prompt that ranks divide."""
    return {0: [5, 61, 7]}, {0: [300]}, {0: list(range(100, 100 + ALIGNMENT * (size - 1) + LAST_PART))}


def case_id(case: tuple[native.Run, int]) -> str:
    return "-".join(map(str, case))


@pytest.fixture(scope="module", params=CASES, ids=case_id)
def case(request: pytest.FixtureRequest) -> tuple[native.Run, int]:
    return request.param


@pytest.fixture(scope="module")
def run(case: tuple[native.Run, int]) -> Iterator[native.Run]:
    with native.gemms(case[0].target):
        yield case[0]


@pytest.fixture(scope="module")
def checkpoint(case: tuple[native.Run, int], run: native.Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a group of two heads for each rank, and as many columns of an expert as kernels take at least."""
    _, size = case
    shapes = {"num_hidden_layers": len(LAYERS), "n_routed_experts": 6}
    shapes |= {
        "num_attention_heads": 2 * size,
        "o_groups": size,
        "moe_intermediate_size": 64 * size,
        "index_topk": TOPK,
    }
    return native.write_checkpoint(run.target, tmp_path_factory.mktemp("tiny"), seed=11, mode=run.mode, **shapes)


def load(run: native.Run, checkpoint: Path, parallel: TensorParallel) -> Standalone:
    sizes: dict[str, Any] = {"device": DEVICE, "requests": 1, "capacity": 256}
    return Standalone(checkpoint, target=run.target, mode=run.mode, parallel=parallel, **sizes)


@pytest.fixture(scope="module")
def exchange(case: tuple[native.Run, int]) -> Exchange:
    """Dividing passes of as many tokens as the last one's, and no sublayer that runs alone."""
    return Exchange(case[1], least_tokens=len(passes(case[1])[-1][0]))


@pytest.fixture(scope="module")
def whole(run: native.Run, checkpoint: Path) -> Standalone:
    return load(run, checkpoint, TensorParallel())


@pytest.fixture(scope="module")
def ranks(run: native.Run, checkpoint: Path, exchange: Exchange) -> list[Standalone]:
    return [load(run, checkpoint, parallel) for parallel in exchange.ranks]


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Relative error of the worst row."""
    assert bool(torch.isfinite(found).all())
    return float(((found - expected).norm(dim=-1) / expected.norm(dim=-1)).max())


@pytest.mark.parametrize("layer", LAYERS)
def test_parts_of_sublayers_add_up(layer: int, run: native.Run, whole: Standalone, ranks: list[Standalone]):
    """But for the rounding of each part and their sum to bf16, and of wo_b's input to NVFP4."""
    ids = torch.tensor([5, 61, 7, 300, 12, 95], device=DEVICE)
    x = torch.randn(len(ids), whole.config.hidden_size, generator=torch.Generator().manual_seed(3)).bfloat16()

    def sublayers(model: Standalone) -> tuple[Tensor, Tensor]:
        model.reset()
        work = model.begin({0: ids.tolist()})
        block: Any = model.decoder.layers[layer]
        attended = block.attn(in_form(x.to(DEVICE), block.attn.takes), work.step, model.caches.layers[layer])
        return attended.float(), block.ffn(in_form(x.to(DEVICE), block.ffn.takes), ids, work.step).float()

    (attention, experts), *parts = map(sublayers, (whole, *ranks))
    errors = [
        relative_error(torch.stack(added).sum(0), expected)
        for added, expected in zip(zip(*parts, strict=True), (attention, experts), strict=True)
    ]
    print("relative errors of the sums in attention and experts:", errors)
    assert errors[0] < ATTENTION[run.mode] and errors[1] < EXPERTS


@pytest.fixture(autouse=True)
def few_scores_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step, "MAX_SCORES_AT_ONCE", SCORES_AT_ONCE)


def log_probabilities(model: Standalone, size: int) -> Tensor:
    """Passes of a warm-up with ``ranks`` ranks."""
    model.reset()
    return torch.cat([model.extend(tokens)[0] for tokens in passes(size)]).log_softmax(-1)


def median_distance(found: Tensor, expected: Tensor) -> float:
    """Median over positions of the root mean square distance."""
    return float((found - expected).square().mean(-1).sqrt().median())


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[] if case in WHOLE_MODELS else [pytest.mark.full]) for case in CASES],
    indirect=True,
    ids=case_id,
)
def test_log_probabilities(
    run: native.Run, whole: Standalone, ranks: list[Standalone], exchange: Exchange, checkpoint: Path
):
    """Each number of ranks may be as far from fp32 activations as rounding, in ``w4a4`` to NVFP4, takes the CPU
    reference, so twice that from the other."""
    size = len(ranks)
    rounded, exact = (
        log_probabilities(Standalone(checkpoint, packed=True, mode=mode, dtype=dtype, requests=1, capacity=256), size)
        for mode, dtype in ((run.mode, torch.bfloat16), (ActivationMode.W4A16, torch.float32))
    )
    before = len(exchange.given[0])
    found = exchange.run(lambda rank: log_probabilities(ranks[rank], size))
    assert all(torch.equal(one, found[0]) for one in found)
    collectives = 2 * COLLECTIVES["all tokens"] + COLLECTIVES["divided"]
    assert [len(given) - before for given in exchange.given] == [collectives] * len(ranks)
    expected, yardstick = log_probabilities(whole, size), median_distance(rounded, exact)
    (prompt,) = passes(size)[-1].values()
    kept = [tokens_of(rank, len(prompt)).kept for rank in exchange.ranks]
    assert len({(part.start, part.stop) for part in kept}) == len(ranks)
    last = slice(len(expected) - len(prompt), None)
    parts = [(found[0], expected), *((found[0][last][part], expected[last][part]) for part in kept)]
    distances = [median_distance(*part) for part in parts]
    print("median distance of several ranks from one, all and each rank's tokens of the last prompt:", distances)
    print("of rounded activations from fp32:", yardstick)
    assert max(distances) <= 2 * yardstick


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[] if case in WHOLE_MODELS[:1] else [pytest.mark.full]) for case in CASES],
    indirect=True,
    ids=case_id,
)
def test_pushed_sums(
    run: native.Run, ranks: list[Standalone], exchange: Exchange, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
):
    """Ranks that push their parts find, if they are two, the bits of a collective's sums, and leave inboxes empty."""
    size = len(ranks)
    pushing = exchange.pushing(CAPACITY, ranks[0].config.hidden_size, DEVICE)
    monkeypatch.setattr(sites, "Inbox", pushing.inbox)
    models = [load(run, checkpoint, rank) for rank in pushing.ranks]
    before = len(exchange.given[0])
    found = exchange.run(lambda rank: log_probabilities(models[rank], size))
    assert all(torch.equal(one, found[0]) for one in found) and pushing.are_empty
    # Attention's last GEMM stores in several tensors on Hopper, where its operands are NVFP4 and bf16.
    left = 0 if run == native.Run("sm_90a", ActivationMode.W4A16) else len(LAYERS)
    assert [len(given) - before for given in exchange.given] == [2 * left + COLLECTIVES["divided"]] * size
    expected = exchange.run(lambda rank: log_probabilities(ranks[rank], size))[0]
    if size == 2:
        assert torch.equal(found[0], expected)
    else:
        assert median_distance(found[0], expected) <= ORDER_OF_SUMS


def test_divided_selection(whole: Standalone, ranks: list[Standalone], exchange: Exchange):
    """Ranks choose for their own tokens, in parts, what one that has all chooses by the same keys and queries."""
    config, (prompt,) = whole.config, passes(len(ranks))[-1].values()
    generator = torch.Generator().manual_seed(7)
    width = config.index_n_heads * config.index_head_dim
    index_q = torch.randn(len(prompt), width, generator=generator).bfloat16().to(DEVICE)
    weights = torch.randn(len(prompt), config.index_n_heads, generator=generator).to(DEVICE)
    pages = packed(whole.caches.layers[CSA].index)
    rows = torch.arange(len(pages.pages) * pages.page_size, device=DEVICE)
    keys = torch.randn(len(rows), config.index_head_dim, generator=generator).to(DEVICE)

    def entries(model: Standalone) -> Tensor:
        model.reset()
        work, cache = model.begin({0: prompt}), model.caches.layers[CSA]
        assert cache.index is not None
        cache.index.write(rows, keys)
        select = cast(Block, model.decoder.layers[CSA]).attn.select
        slots, lengths = cast(Any, select)(index_q, weights, work.step, cache)
        return torch.cat((slots, lengths[:, None]), dim=1)

    expected = entries(whole)
    assert expected[:, -1].tolist() == [min(n // 4, TOPK) for n in range(1, len(prompt) + 1)]
    assert len({tuple(row) for row in expected[-8:].tolist()}) > 4, "the queries choose alike"
    for found in exchange.run(lambda rank: entries(ranks[rank])):
        assert torch.equal(found, expected)


def test_a_model_that_cannot_be_split_is_refused(case: tuple[native.Run, int], run: native.Run, checkpoint: Path):
    _, size = case
    with pytest.raises(ConfigError, match=f"o_groups is {size}, expected a multiple of {2 * size}"):
        load(run, checkpoint, TensorParallel(0, 2 * size))
