"""Latents beside the compressors of their layer: each part gives what it gives alone."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

from nvfp4_sgl.errors import OperandError
from nvfp4_sgl.formats.rows import Rows
from nvfp4_sgl.ops.norm import rms_norm as reference_norm
from nvfp4_sgl.ops.rope import inverse_frequencies
from nvfp4_sgl.triton_kernels.attention_inputs import prepare as attention_inputs
from nvfp4_sgl.triton_kernels.attention_inputs.compressor import new_workspace
from nvfp4_sgl.triton_kernels.attention_inputs.index_weights import MAX_TOKENS, IndexWeights
from nvfp4_sgl.triton_kernels.attention_inputs.latent import Latents
from nvfp4_sgl.triton_kernels.attention_inputs.prepare import TWO_LAUNCH_MIN_TOKENS, prepare_attention
from nvfp4_sgl.triton_kernels.common.rope import rope_cos_sin
from nvfp4_sgl.triton_kernels.entries.kv_entry import norm_rope_store_kv, page_bytes
from tests.triton.support.compression import FREQUENCIES, World
from tests.triton.support.interpreter import run_backwards
from tests.triton.support.resources import resources
from tests.triton.support.rows import poisoned_rows, require_quantized

EPS = 1e-6
LAYERS = {"SWA": [], "CSA": [(4, 512), (4, 128)], "HCA": [(128, 512)]}


def some_latents(tokens: int, width: int, dtype: torch.dtype, device: str) -> Latents:
    """Columns of a product that are large, small and zero; slots anywhere and outside; results poisoned."""
    generator = torch.Generator().manual_seed(width + tokens)
    wide = torch.randn(tokens, width + 512 + 64, generator=generator) * 3
    wide[:, ::91] *= 300
    wide[4:5] = 0.0
    q_lora, kv, _ = wide.to(dtype).to(device).split([width, 512, 64], dim=1)
    q_norm, kv_norm = (torch.rand(n, generator=generator).add(0.5).bfloat16().to(device) for n in (width, 512))
    positions = torch.randint(1 << 20, (tokens,), generator=generator).to(device)
    cos_sin = rope_cos_sin(positions, inverse_frequencies(64, 1e4).to(device), torch.empty(tokens, 64, device=device))
    slots = torch.randperm(max(512, tokens), generator=generator)[:tokens].int()
    slots[2:3], slots[3:4] = -1, 512
    return Latents(
        q_lora=q_lora,
        q_norm=q_norm,
        q_out=torch.full((tokens, width), torch.nan, dtype=torch.bfloat16, device=device),
        kv=kv,
        kv_norm=kv_norm,
        eps=EPS,
        cos_sin=cos_sin,
        slots=slots.to(device),
        pages=torch.full((2, page_bytes(256)), 0xA5, dtype=torch.uint8, device=device),
        page_size=256,
    )


def check_latents(latents: Latents) -> None:
    expected = torch.full_like(latents.pages, 0xA5)
    norm_rope_store_kv(latents.kv, latents.kv_norm, EPS, latents.cos_sin, latents.slots, expected, 256)
    # The sum of squares is of another order in either launch: a code next to a tie may differ by one.
    different = (latents.pages.int() - expected.int())[latents.pages != expected]
    assert different.numel() <= 4 and bool((different.abs() == 1).all())
    assert latents.q_out is not None
    exact = reference_norm(latents.q_lora.cpu().float(), latents.q_norm.cpu(), EPS)
    assert bool(((latents.q_out.cpu().float() - exact).abs() <= exact.abs() * 2.0**-8).all())


def check_pass(world: World, counts: dict[int, int], width: int, *, padding: int = 0) -> None:
    batch, wide = world.prepare(counts, padding)
    latents = some_latents(batch.tokens, width, torch.float32, world.device)
    prepare_attention(latents, world.calls(wide), batch, world.frequencies, workspace=world.workspace)
    check_latents(latents)
    world.check_states(padding=padding > 0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("width", [128, 1024, 1536])
def test_latents_alone(width: int, dtype: torch.dtype, device: str):
    world = World([], device)
    batch = world.batch([1], [0], [9])
    latents = some_latents(9, width, dtype, device)
    prepare_attention(latents, [], batch, world.frequencies)
    check_latents(latents)


@pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("tokens", "width", "token_tile"), [(1, 64, 8), (3, 192, 8), (8, 1536, 128), (17, 1024, 16)])
def test_quantized_latents(tokens: int, width: int, token_tile: int, dtype: torch.dtype, device: str):
    """The rows of what the launch stores in bf16, and the same without it."""
    world = World([], device)
    batch = world.batch([1], [0], [tokens])
    both = some_latents(tokens, width, dtype, device)
    both.q_lora[tokens // 2, 5] = torch.inf  # q_lora is then 0 but for a NaN, which becomes 0
    both = replace(both, q_rows=poisoned_rows(tokens, width, device, token_tile))
    alone = replace(both, q_out=None, q_rows=poisoned_rows(tokens, width, device, token_tile))
    for latents in (both, alone):
        prepare_attention(latents, [], batch, world.frequencies)
        assert both.q_out is not None and latents.q_rows is not None
        require_quantized(latents.q_rows, both.q_out)
    assert both.q_out is not None and both.q_out[tokens // 2, 5].isnan()


@pytest.mark.parametrize("layer", ["CSA", "HCA"])
def test_quantized_latents_beside_compressors(layer: str, device: str):
    world = World(LAYERS[layer], device, requests=4)
    world.suppose({1: 120, 2: 125, 3: 3})
    for counts in ({1: 7, 2: 2, 4: 5}, dict.fromkeys((1, 2, 3, 4), 1)):
        batch, wide = world.prepare(counts)
        latents = some_latents(batch.tokens, 192, torch.float32, device)
        latents = replace(latents, q_rows=poisoned_rows(batch.tokens, 192, device, 8))
        prepare_attention(latents, world.calls(wide), batch, world.frequencies, workspace=world.workspace)
        check_latents(latents)
        assert latents.q_out is not None and latents.q_rows is not None
        require_quantized(latents.q_rows, latents.q_out)
        world.check_states()
    world.check_entries()


def some_index_weights(tokens: int, heads: int, width: int, device: str) -> IndexWeights:
    """Rows with outliers, wider apart than they are long; the result poisoned."""
    generator = torch.Generator().manual_seed(heads + width)
    x = torch.randn(tokens, width + 8, generator=generator)
    x[:, ::53] *= 100
    weight = torch.randn(heads, width, generator=generator) * width**-0.5
    out = torch.full((tokens, heads + 3), float("nan"), device=device)[:, :heads]
    return IndexWeights(x.bfloat16().to(device)[:, :width], weight.bfloat16().to(device), out)


def check_index_weights(given: IndexWeights) -> None:
    exact = given.x.double() @ given.weight.double().T
    slack = given.x.double().abs() @ given.weight.double().abs().T * given.x.shape[1] * 2.0**-24
    assert bool(((given.out.double() - exact).abs() <= slack).all())


@pytest.mark.parametrize("tokens", [1, 3, 4])
def test_index_weights_beside_the_rest(tokens: int, device: str):
    """All of a CSA layer's inputs in one launch; heads and columns that no block divides."""
    world = World(LAYERS["CSA"], device, requests=4)
    world.suppose({1: 120, 2: 125, 3: 3})
    batch, wide = world.prepare(dict.fromkeys(range(1, tokens + 1), 1))
    latents, given = some_latents(tokens, 128, torch.float32, device), some_index_weights(tokens, 5, 600, device)
    around = torch.full((MAX_TOKENS, 8), torch.nan, device=device)
    given = replace(given, out=around[:tokens, :5])
    prepare_attention(
        latents, world.calls(wide), batch, world.frequencies, workspace=world.workspace, index_weights=given
    )
    assert bool(around[tokens:].isnan().all()) and bool(around[:, 5:].isnan().all()), "stored outside the result"
    check_latents(latents)
    world.check_states()
    world.check_entries()
    check_index_weights(given)


def test_index_weights_alone(device: str):
    world, given = World(LAYERS["SWA"], device, requests=3), some_index_weights(3, 5, 600, device)
    batch, _ = world.prepare(dict.fromkeys(range(1, 4), 1))
    prepare_attention(None, [], batch, world.frequencies, index_weights=given)
    check_index_weights(given)


@pytest.mark.parametrize("each", [2, 16])
@pytest.mark.parametrize("order", ["forwards", "backwards"])
@pytest.mark.parametrize("layer", ["CSA", "HCA"])
def test_layers(layer: str, order: str, each: int, device: str, monkeypatch: pytest.MonkeyPatch):
    """Ragged, then decode of windows that close and do not, with padding; programs of one and of several tokens."""
    if order == "backwards":
        run_backwards(monkeypatch)
    monkeypatch.setattr(attention_inputs, "HCA_DECODE_PROGRAMS", each)
    world = World(LAYERS[layer], device, requests=4)
    world.suppose({1: 120, 2: 125, 3: 3})
    check_pass(world, {1: 7, 2: 2, 4: 5}, 128)
    check_pass(world, {4: 1}, 128)
    for padding in (0, 1):
        check_pass(world, {1: 1, 2: 1, 3: 1, 4: 1}, 160, padding=padding)
    world.check_entries()


@pytest.mark.parametrize("layer", ["CSA", "HCA"])
def test_apart_and_together(layer: str, device: str, monkeypatch: pytest.MonkeyPatch):
    """One pass whose latents and compressors are launched apart leaves the entries that passes of both sizes leave."""
    monkeypatch.setattr(attention_inputs, "TWO_LAUNCH_MIN_TOKENS", 16)
    whole, chunked = World(LAYERS[layer], device), World(LAYERS[layer], device)
    for world in (whole, chunked):
        world.suppose({1: 95})
    check_pass(whole, {1: 60}, 128)
    for count in (15, 16, 1, 28):
        check_pass(chunked, {1: count}, 128)
    chunked.check_entries()
    for one, other in zip(whole.sides, chunked.sides, strict=True):
        assert torch.equal(one.pages, other.pages)


@pytest.mark.gpu
@pytest.mark.parametrize("layer", ["CSA", "HCA"])
def test_chunks_of_a_long_prefill(layer: str, device: str):
    whole, chunked = World(LAYERS[layer], device, capacity=8192), World(LAYERS[layer], device, capacity=8192)
    chunks = (1100, TWO_LAUNCH_MIN_TOKENS - 1, TWO_LAUNCH_MIN_TOKENS, 1, 352, 1)
    for world, counts in ((whole, (sum(chunks) - 1, 1)), (chunked, chunks)):
        for count in counts:
            batch, wide = world.prepare({1: count})
            latents = some_latents(count, 1024, torch.float32, device)
            prepare_attention(latents, world.calls(wide), batch, world.frequencies, workspace=world.workspace)
            check_latents(latents)
            world.check_states()
    assert whole.lengths == chunked.lengths
    whole.check_entries()
    for one, other in zip(whole.sides, chunked.sides, strict=True):
        assert torch.equal(one.pages, other.pages)


@pytest.mark.gpu
@pytest.mark.parametrize("layer", LAYERS)
def test_large_passes_beside_latents(layer: str, device: str):
    world = World(LAYERS[layer], device, requests=48, capacity=2048)
    world.suppose({request: 40 * request for request in range(1, 49)})
    for tokens in (10, 1, 1, 1, 1):
        check_pass(world, dict.fromkeys(range(1, 49), tokens), 1536)
    world.check_entries()


def test_no_tokens(device: str):
    world = World(LAYERS["HCA"], device)
    check_pass(world, {1: 0}, 128)


def test_refusals(device: str):
    world = World(LAYERS["HCA"], device)
    batch = world.batch([1], [0], [6])
    good = some_latents(6, 128, torch.float32, device)
    refused: list[tuple[dict[str, Any], str]] = [
        ({"q_lora": good.q_lora[:1]}, "q_lora: expected shape"),
        ({"q_norm": good.q_norm[:64]}, "weight: expected shape"),
        ({"q_out": good.q_lora.half()}, "q_out: expected dtype"),
        ({"q_out": None}, "expected q_out, q_rows or both"),
        ({"q_rows": Rows.allocate(5, 128, 8, device)}, "q_rows.codes: expected shape"),
        ({"kv": good.kv[:5]}, "kv of latents: expected shape .6, 512."),
        ({"kv": good.kv[:, :256]}, "kv: expected shape"),
        ({"cos_sin": good.cos_sin[:, :32].contiguous()}, "rope_dim of cos_sin"),
        ({"slots": good.slots.float()}, "slots: expected dtype"),
        ({"page_size": 512}, "pages of 512 entries"),
        ({"cos_sin": good.cos_sin.to("meta")}, f"cos_sin: expected device {device}"),
    ]
    weights = some_index_weights(6, 4, 64, device)
    for given, message in [
        (replace(weights, x=weights.x[:5]), "index weights: x: expected shape"),
        (replace(weights, weight=weights.weight.float()), "index weights: weight: expected dtype"),
        (replace(weights, out=weights.out.bfloat16()), "index weights: out: expected dtype"),
        (some_index_weights(MAX_TOKENS + 1, 4, 64, device), "index weights: x: expected shape"),
    ]:
        with pytest.raises(OperandError, match=message):
            prepare_attention(None, [], batch, FREQUENCIES.to(device), index_weights=given)
    for bad, message in refused:
        with pytest.raises(OperandError, match=message):
            prepare_attention(replace(good, **bad), [], batch, FREQUENCIES.to(device))


def launches() -> None:
    for cases in LAYERS.values():
        world = World(cases, "cpu", capacity=TWO_LAUNCH_MIN_TOKENS)
        world.workspace = new_workspace(256, 256, "cpu")
        decode = [world.batch([1] * tokens, [0] * tokens, [1] * tokens) for tokens in (16, 256)]
        for batch in (world.batch([1], [0], [64]), world.batch([1], [0], [TWO_LAUNCH_MIN_TOKENS]), *decode):
            wide = torch.zeros(batch.tokens, world.rows.shape[2])
            latents = some_latents(batch.tokens, 1536, torch.float32, "cpu")
            quantized = replace(latents, q_out=None, q_rows=Rows.allocate(batch.tokens, 1536, 128, "cpu"))
            for given in (latents, quantized):
                prepare_attention(given, world.calls(wide), batch, FREQUENCIES, workspace=world.workspace)
        if len(cases) == 2:
            for tokens in (1, MAX_TOKENS):
                batch = world.batch([1] * tokens, [0] * tokens, [1] * tokens)
                latents = some_latents(tokens, 1536, torch.float32, "cpu")
                latents = replace(latents, q_out=None, q_rows=Rows.allocate(tokens, 1536, 8, "cpu"))
                wide = torch.zeros(tokens, world.rows.shape[2])
                weights = some_index_weights(tokens, 64, 4096, "cpu")
                prepare_attention(latents, world.calls(wide), batch, FREQUENCIES, index_weights=weights)


@pytest.mark.parametrize("architecture", [90, 100])
def test_kernels_fit(architecture: int):
    found = [usage for usage in resources(__name__) if usage.architecture == architecture]
    # With q_lora in bf16 and in NVFP4: latents alone; with two compressors in prefill and decode; with one in prefill,
    # and decode by one token and eight. Two compressors and one without latents, in a large prefill. Two compressors
    # beside index weights, of one token and of as many as are made here. cos and sin of one token and of several.
    kernels = Counter(usage.kernel for usage in found)
    assert kernels == {"_attention_inputs": 2 * 6 + 2 + 2, "_cos_sin_kernel": 2}
    for usage in found:
        # sin and cos of large angles keep their reduction in a small array.
        assert usage.local == 0 and usage.stack <= 48
