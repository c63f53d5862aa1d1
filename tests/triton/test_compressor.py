"""Compression: state rows and entries against the reference's, over passes that cut the windows everywhere."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from nvfp4_sgl.cache.layout import PAGE_TOKENS
from nvfp4_sgl.errors import OperandError
from nvfp4_sgl.formats import kv_entry
from nvfp4_sgl.triton_kernels.attention_inputs import prepare as attention_inputs
from nvfp4_sgl.triton_kernels.attention_inputs.compressor import new_workspace
from nvfp4_sgl.triton_kernels.attention_inputs.prepare import prepare_attention
from nvfp4_sgl.triton_kernels.attention_inputs.windows import unit_limit
from tests.triton.support.compression import FREQUENCIES, POISON, World, bits
from tests.triton.support.interpreter import run_backwards
from tests.triton.support.resources import resources

CASES = [(4, 512), (4, 128), (128, 512)]
"""(ratio, n): the main compressor of a CSA layer, its indexer's, that of an HCA layer."""


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("edge", ["first", 256])
def test_decoding_across_an_edge(case: tuple[int, int], edge: int | str, device: str):
    world = World([case], device)
    edge = case[0] if isinstance(edge, str) else edge
    world.suppose({1: edge - 3})
    while world.lengths[1] < edge + 5:
        world.run({1: 1})
    world.check_entries()


def test_decoding_from_window_to_window_of_128(device: str):
    world = World([(128, 512)], device)
    for count in (126, 1, 1, 1, 125, 1, 1, 1):
        world.run({1: count})
    assert world.lengths[1] == 257
    world.check_entries()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_ragged_prefill_of_bf16(case: tuple[int, int], device: str):
    world = World([case], device, requests=4, dtype=torch.bfloat16)
    world.suppose({2: 120})
    world.run({1: 3, 2: 11, 3: 1, 4: 4})
    world.run({4: 14, 1: 2, 2: 127, 3: 7})
    world.run({4: 1, 2: 4, 3: 1})
    world.check_entries()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_rows_that_are_not_packed(case: tuple[int, int], device: str):
    world = World([case], device, requests=2, packed=False)
    world.suppose({1: 120})
    world.run({1: 7, 2: 10})
    world.run({1: 2, 2: 3})
    world.check_entries()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_chunks_equal_one_pass(case: tuple[int, int], device: str):
    whole, chunked = World([case], device), World([case], device)
    first, counts = (218, (1, 2, 5, 29, 2, 3, 1, 10)) if case[0] == 4 else (100, (20, 10, 120, 5, 1, 1))
    for world in (whole, chunked):
        world.suppose({1: first})
    whole.run({1: sum(counts)})
    for count in counts:
        chunked.run({1: count})
    assert chunked.lengths == whole.lengths
    chunked.check_entries()
    assert torch.equal(chunked.sides[0].pages, whole.sides[0].pages)


@pytest.mark.parametrize("start", [251, 252, 253, 254, 255])
def test_passes_over_the_end_of_a_page(start: int, device: str):
    """A ratio-4 ring ends with its page, a window or two before the next one's rows are kept."""
    for count in (2, 3, 9, 13):
        world = World([(4, 128)], device)
        world.suppose({1: start})
        world.run({1: count})
        world.check_entries()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_prefix_of_another_request(case: tuple[int, int], device: str):
    """A hit of one page: the second request's slots begin with the first one's, and its state ring is stale."""
    world = World([case], device, requests=2)
    world.suppose({1: 256, 2: 90})
    world.slots[2, :256] = world.slots[1, :256]
    world.rows[2, :256] = world.rows[1, :256]
    world.lengths[2] = 256
    world.run({2: 9, 1: 2})
    world.run({2: 1, 1: 1})
    world.run({2: 1, 1: 1})
    world.suppose({2: 115, 1: 122})
    world.run({2: 3, 1: 3})
    world.check_entries()


def test_the_pair_in_one_launch(device: str):
    together = World([(4, 512), (4, 128)], device, requests=3)
    apart = World([(4, 512), (4, 128)], device, requests=3)
    for world in (together, apart):
        world.suppose({3: 250})
    for counts in ({1: 2, 2: 9, 3: 9}, {1: 1, 2: 1, 3: 1}, {3: 1, 1: 1, 2: 1}):
        together.run(counts, pair=True)
        apart.run(counts)
    together.check_entries()
    for one, other in zip(together.sides, apart.sides, strict=True):
        assert torch.equal(one.pages, other.pages)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_padding_harms_nothing(case: tuple[int, int], device: str):
    world = World([case], device, requests=2)
    world.suppose({1: 126, 2: 6})
    for _ in range(3):
        world.run({1: 1, 2: 1}, padding=3)
    world.check_entries()


def test_programs_of_several_tokens(device: str, monkeypatch: pytest.MonkeyPatch):
    """At ratio 128 large decode batches share programs: of four tokens here, of which some close, or none, or all."""
    monkeypatch.setattr(attention_inputs, "HCA_DECODE_PROGRAMS", 2)
    world = World([(128, 512)], device, requests=5)
    world.suppose({1: 127, 2: 127, 3: 5, 4: 126, 5: 255})
    for padding in (0, 3):
        world.run({1: 1, 2: 1, 3: 1, 4: 1, 5: 1}, padding=padding)
    world.suppose({1: 125})
    world.run({1: 0, 2: 1, 3: 3, 4: 0, 5: 1})
    world.run({1: 2, 2: 0, 3: 1, 4: 1, 5: 1})
    world.suppose({2: 125, 3: 118})
    world.run({1: 1, 2: 1, 3: 1, 4: 1, 5: 1})
    world.check_entries()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_as_many_tokens_as_requests_but_not_one_each(case: tuple[int, int], device: str):
    world = World([case], device, requests=4)
    world.suppose({1: 127, 2: 7, 3: 3, 4: 126})
    world.run({1: 0, 2: 3, 3: 0, 4: 1})
    world.run({1: 2, 2: 0, 3: 2, 4: 0})
    world.run({4: 0, 1: 0, 2: 0, 3: 4})
    world.run({1: 0, 4: 4, 2: 0, 3: 0})
    world.check_entries()


@pytest.mark.parametrize(("case", "start", "count", "units"), [(CASES[0], 2, 14, 2), (CASES[2], 100, 130, 1)])
def test_programs_beyond_the_last_unit_do_nothing(
    case: tuple[int, int], start: int, count: int, units: int, device: str
):
    """They would take the request's first unit again, whose history in the state the pass has overwritten."""
    assert unit_limit(count, 1, case[0]) == units + 1
    world = World([case], device)
    world.suppose({1: start})
    world.run({1: count})
    world.check_entries()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_request_that_adds_nothing(case: tuple[int, int], device: str):
    world = World([case], device, requests=3)
    world.suppose({2: 120})
    world.run({1: 0, 2: 20, 3: 0})
    world.run({1: 5, 2: 0, 3: 11})
    world.check_entries()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_programs_may_run_in_any_order(case: tuple[int, int], device: str, monkeypatch: pytest.MonkeyPatch):
    """Backwards here: no program overwrites a state row that another has yet to read."""
    run_backwards(monkeypatch)
    world = World([case], device, requests=3)
    world.suppose({1: 3, 2: 247, 3: 127})
    for counts in ({1: 13, 2: 25, 3: 13}, {1: 120, 2: 1, 3: 130}, {1: 1, 2: 1, 3: 1}):
        world.run(counts)
    world.check_entries()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_state_in_bf16(case: tuple[int, int], device: str):
    world = World([case], device, state_dtype=torch.bfloat16)
    world.suppose({1: 124})
    for count in (3, 1, 1, 4):
        world.run({1: count})
    world.check_entries()


def test_no_tokens(device: str):
    world = World([(4, 512), (128, 512)], device)
    world.run({1: 0})
    world.check_entries()


def test_units_are_never_more_than_the_limit():
    for ratio, windows in ((4, 2), (128, 1)):
        for start in range(2 * ratio):
            for count in range(1, 5 * ratio):
                end = start + count
                last = -(-end // 4) if ratio == 4 else end // 128
                assert max(1, -(-(last - start // ratio) // windows)) <= unit_limit(count, 1, ratio)
        # The sum over requests is covered, too: a floor of a sum is no less than the sum of floors.
        assert unit_limit(8, 8, ratio) == 8 and unit_limit(0, 4, ratio) == 0
    assert unit_limit(8192, 1, 4) == 1025 and unit_limit(8192, 1, 128) == 64


def test_refusals():
    world = World([(4, 512), (4, 128), (128, 512)], "cpu")
    wide = torch.zeros(3, world.rows.shape[2])
    batch = world.batch([1], [0], [3])
    csa, index, hca = (side.call(*world.columns(wide, i), "cpu") for i, side in enumerate(world.sides))

    for call, message in [
        (replace(csa, kv=csa.kv[:2]), "kv: expected shape"),
        (replace(csa, score=csa.score.half()), "score: expected dtype"),
        (replace(csa, score=torch.zeros(1024, 3).T), "score: expected the last dimension"),
        (replace(csa, state=csa.state[:, :-1]), "state: expected shape"),
        (replace(csa, page_size=128), "pages of 128 entries"),
        (replace(csa, pages=csa.pages.float()), "pages: expected shape"),
        (replace(csa, compressor=replace(csa.compressor, ratio=8)), "ratio: expected one of"),
        (replace(csa, compressor=replace(csa.compressor, ape=csa.compressor.ape[:3])), "ape: expected shape"),
        (replace(csa, compressor=replace(csa.compressor, norm=torch.ones(64))), "n: expected one of"),
        (replace(index, compressor=replace(index.compressor, ratio=128)), "n: expected one of"),
        (replace(csa, ring=128), "ring: expected one of .8, 16."),
        (hca, "workspace: expected one"),
    ]:
        with pytest.raises(OperandError, match=message):
            prepare_attention(None, [call], batch, FREQUENCIES)
    with pytest.raises(OperandError, match="at least 1 units, found 0"):
        prepare_attention(None, [hca], batch, FREQUENCIES, workspace=new_workspace(0, 0, "cpu"))
    with pytest.raises(OperandError, match="two of ratio 4, found .4, 128."):
        prepare_attention(None, [csa, hca], batch, FREQUENCIES)
    with pytest.raises(OperandError, match="frequencies: expected shape"):
        prepare_attention(None, [csa, index], batch, FREQUENCIES[:8])
    with pytest.raises(OperandError, match=r"window_slots' columns: .*, found 4"):
        narrow = replace(batch, window_slots=batch.window_slots[:, :4].contiguous())
        prepare_attention(None, [csa, index], narrow, FREQUENCIES)


@pytest.mark.gpu
def test_large_passes(device: str):
    """Also that the last of a window's programs finds what the others left, time and again."""
    generator = torch.Generator().manual_seed(9)
    world = World(CASES, device, requests=48, capacity=2048)
    for most in (1000, 300, 2, 300):
        counts = torch.randint(0, most, (48,), generator=generator).tolist()
        world.run(dict(enumerate(counts, 1)), pair=True)
    world.suppose({request: -length % 128 + 126 for request, length in enumerate(world.lengths) if request})
    for _ in range(5):
        world.run(dict.fromkeys(range(1, 49), 1), padding=16, pair=True)
    world.check_entries()


@pytest.mark.gpu
def test_a_captured_step_follows_its_inputs(device: str):
    world, one_each = World(CASES, device, requests=4), {1: 1, 2: 1, 3: 1, 4: 1}
    world.suppose({1: 123, 2: 251, 3: 0, 4: 6})
    world.run(one_each, padding=4, pair=True)
    batch, wide = world.prepare(one_each, 4)
    calls, graph = world.calls(wide), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        world.launch(calls, batch, pair=True)
    for _ in range(8):
        graph.replay()
        world.check_states(padding=True)
        next_batch, next_wide = world.prepare(one_each, 4)
        wide.copy_(next_wide)
        for name, value in vars(batch).items():
            if isinstance(value, torch.Tensor):
                value.copy_(getattr(next_batch, name))
    graph.replay()
    world.check_entries()


@pytest.mark.gpu
def test_pools_beyond_2_gib(device: str):
    """One request whose pages lie at the end of every buffer."""
    last = 300_000
    state = torch.full(((last + 1) * 8, 2048), torch.nan, device=device)
    pages = torch.full((last + 1, kv_entry.page_bytes(64)), POISON, dtype=torch.uint8, device=device)
    world = World([(4, 512)], device)
    near = world.sides[0]
    batch, wide = world.prepare({1: 250})
    call = world.calls(wide)[0]
    world.launch([call], batch)
    shift = (last - world.pages + 1) * PAGE_TOKENS
    window_slots = torch.where(batch.window_slots >= 0, batch.window_slots + shift, -1)
    far = replace(batch, pages=batch.pages + shift, window_slots=window_slots)
    world.launch([replace(call, state=state, pages=pages)], far)
    assert torch.equal(bits(state[-near.state.shape[0] :]), bits(near.state))
    assert torch.equal(pages[-near.pages.shape[0] :], near.pages)
    assert bool((pages[: -near.pages.shape[0]] == POISON).all())


def launches() -> None:
    world = World([(4, 512), (4, 128), (128, 512)], "cpu")
    world.workspace = new_workspace(256, 256, "cpu")
    decode = [world.batch([1] * tokens, [0] * tokens, [1] * tokens) for tokens in (16, 256)]
    for batch in (world.batch([1], [0], [64]), *decode):
        wide = torch.zeros(batch.tokens, world.rows.shape[2])
        csa, index, hca = (side.call(*world.columns(wide, i), "cpu") for i, side in enumerate(world.sides))
        prepare_attention(None, [csa, index], batch, FREQUENCIES)
        prepare_attention(None, [hca], batch, FREQUENCIES, workspace=world.workspace)


@pytest.mark.parametrize("architecture", [90, 100])
def test_kernels_fit(architecture: int):
    found = [usage for usage in resources(__name__) if usage.architecture == architecture]
    assert len(found) == 5  # prefill and decode, and of HCA decode by one token and by eight
    for usage in found:
        # sin and cos of large angles keep their reduction in a small array and are polynomials of fused steps.
        assert usage.local == 0 and usage.stack <= 56
        assert usage.count("fma.rn.f32") == 0
    # The programs of a window of ratio 128 count themselves in.
    assert sorted(usage.count("atom.global.gpu.acq_rel.add") for usage in found) == [0, 0, 1, 1, 1]
