"""Plans: complete for a model, the same for the same sizes, and for any number of tokens if they are pinned."""

from __future__ import annotations

import pytest
import torch

from nvfp4_sgl.config import ModelConfig
from nvfp4_sgl.cutedsl_kernels import plan, warm_up
from nvfp4_sgl.cutedsl_kernels.common.clusters import B200_CLUSTERS, Clusters
from nvfp4_sgl.cutedsl_kernels.compiled import KernelKey
from nvfp4_sgl.cutedsl_kernels.plan import Pin, pairs_in, rows_of
from nvfp4_sgl.cutedsl_kernels.sm100.shape import KernelShape
from nvfp4_sgl.cutedsl_kernels.w4a4 import operations
from nvfp4_sgl.cutedsl_kernels.w4a4.operand import Weights
from nvfp4_sgl.errors import OperandValueError
from nvfp4_sgl.formats.rows import Rows
from nvfp4_sgl.formats.scale_layout import scale_bytes
from nvfp4_sgl.triton_kernels.experts.permutation import padded_rows
from nvfp4_sgl.weights.gemms import GemmSpec, distinct_gemms
from tests.support.reference_gemms import dry_gemms
from tests.support.released import FLASH, PRO, config_json

LIMIT = 10.0
TOKENS = (1, 2, 3, 8, 9, 31, 64, 65, 200, 257, 300, 319, 1000, 2049, 4095, 4096)


def products(base: dict, ranks: int) -> list[GemmSpec]:
    return distinct_gemms(ModelConfig.from_dict(config_json(base)), ranks)


def planned(product: GemmSpec, tokens: int, clusters: Clusters = B200_CLUSTERS, pin: Pin | None = None) -> KernelShape:
    """As the operations plan a call whose rows were made by the kernels before."""
    sizes = product.features, product.k
    if not product.experts_per_token:
        tile = plan.token_tile_for(tokens, pin)
        return plan.plan_gemm(*sizes, tokens, product.groups, tile, product.output, clusters, pin=pin)
    pairs = tokens * product.experts_per_token
    tile = plan.expert_token_tile_for(pairs, product.groups, pin)
    rows = padded_rows(pairs, product.groups, tile)
    groups, gated = product.groups, product.gated
    return plan.plan_experts(*sizes, rows, groups, gated, tile, product.output, clusters, counts_ahead=True, pin=pin)


@pytest.mark.parametrize(("base", "ranks"), [(FLASH, 1), (FLASH, 8), (PRO, 8)], ids=["flash", "flash-8", "pro-8"])
def test_every_number_of_tokens_is_warmed_up(base: dict, ranks: int) -> None:
    keys = set(warm_up.keys_for(products(base, ranks), max(TOKENS), LIMIT, "sm_100a", B200_CLUSTERS))
    for product in products(base, ranks):
        for tokens in TOKENS:
            shape = planned(product, tokens)
            assert KernelKey("sm_100a", shape, LIMIT if shape.gated else None) in keys, (product, tokens)


def test_rows_are_what_the_permutation_makes() -> None:
    for experts in (1, 7, 257):
        for tile in (8, 64, 128):
            for pairs in (1, 2, 7, 56, 257, 258, 1000, 50_000):
                rows = rows_of(pairs, experts, tile)
                assert rows == padded_rows(pairs, experts, tile)
                found = pairs_in(rows, experts, tile)
                assert found <= pairs and rows_of(found, experts, tile) <= rows
                assert pairs - found < tile


def test_experts_of_few_rows_split_k_and_of_many_do_not() -> None:
    gate_up = next(product for product in products(FLASH, 8) if product.gated)
    assert planned(gate_up, 1).split_k >= 4
    assert planned(gate_up, 256).split_k == 1


def test_a_plan_follows_from_its_sizes_alone() -> None:
    every = products(FLASH, 8)
    first = [planned(product, tokens) for product in every for tokens in TOKENS]
    again = [planned(product, tokens) for product in reversed(every) for tokens in reversed(TOKENS)]
    assert first == again[::-1]


@pytest.mark.parametrize("pin", [Pin(), Pin(8, split_k=4), Pin(64, split_k=8), Pin(128, pair=True)], ids=str)
def test_pinned_plans_do_not_depend_on_the_number_of_tokens(pin: Pin) -> None:
    everything = {key.shape for key in plan.every_key("sm_100a", LIMIT, ("bf16", "fp32"))}
    for product in products(FLASH, 8):
        shapes = {planned(product, tokens, pin=pin) for tokens in TOKENS}
        other = {planned(product, 1, Clusters.in_gpcs((16, 16)), pin)}
        assert len(shapes) == 1 and shapes == other
        (shape,) = shapes
        assert (shape.token_tile, shape.pair) == (pin.token_tile, pin.pair)
        # A slice of K has two stages of 256 at least; how long K is does not depend on tokens either.
        fitting = [split for split in (2, 4, 8) if split <= pin.split_k and product.k >= 512 * split]
        assert shape.split_k == max(fitting, default=1)
        assert shape in everything
    assert len({planned(product, tokens) for product in products(FLASH, 8) for tokens in (1, 4096)}) > 4


def test_without_a_pin_the_order_of_sums_may_depend_on_the_number_of_tokens() -> None:
    from_x = products(FLASH, 8)[0]
    assert planned(from_x, 1).split_k > 1 == planned(from_x, 300).split_k


@pytest.mark.parametrize("pin", [None, Pin(16), Pin(64, split_k=8)], ids=str)
def test_operations_and_warm_up_plan_by_the_pin_of_the_launcher(pin: Pin | None) -> None:
    """Also the rows: their token tile is the pin's, so that the call's kernel takes them."""
    product = GemmSpec("from x", 128, 4096, output="bf16")
    weights = Weights(
        torch.zeros(128, 2048, dtype=torch.uint8),
        torch.zeros(scale_bytes(128, 4096), dtype=torch.uint8).view(torch.float8_e4m3fn),
        torch.ones(128),
    )
    with dry_gemms(pin=pin) as dry:
        for tokens in TOKENS[:9]:
            rows = Rows.allocate(tokens, 4096, operations.token_tile_for(tokens), torch.device("cpu"))
            operations.product(rows, weights)
        tile = operations.expert_token_tile_for(100_000, 257)
    ready = warm_up.keys_for([product], TOKENS[8], LIMIT, "sm_100a", B200_CLUSTERS, pin=pin)
    assert set(dry.keys) == set(ready)
    assert len(ready) > 1 if pin is None else {key.shape.token_tile for key in ready} == {tile} == {pin.token_tile}


def test_rows_quantised_for_another_pin_are_refused() -> None:
    with pytest.raises(OperandValueError, match="expected 64, to which plans are pinned, found 8"):
        plan.plan_gemm(128, 256, 1, 1, 8, "bf16", B200_CLUSTERS, pin=Pin(64))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"token_tile": 256}, "token_tile: expected at most 128, found 256"),
        ({"token_tile": 12}, "token_tile 12: expected one of"),
        ({"token_tile": 128, "split_k": 2}, "split_k is for token_tile up to 64, found 128"),
        ({"token_tile": 64, "pair": True}, "token_tile 64 for a CTA pair"),
        ({"split_k": 3}, r"split_k 3: expected one of \(1, 2, 4, 8\)"),
    ],
    ids=str,
)
def test_pins_that_no_kernel_has(fields: dict, message: str) -> None:
    with pytest.raises(OperandValueError, match=message):
        Pin(**fields)
