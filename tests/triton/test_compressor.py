"""Compression: state rows and entries against the reference's, over passes that cut the windows everywhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from triton.runtime import interpreter

from nvfp4_sgl.cache.layout import PAGE_TOKENS, STATE_RING
from nvfp4_sgl.cache.plan import Batch as ReferenceBatch
from nvfp4_sgl.cache.plan import plan_batch
from nvfp4_sgl.cache.rows import ExactRows, PackedIndexRows, PackedKvRows, RowStore
from nvfp4_sgl.numerics import index_entry, kv_entry
from nvfp4_sgl.ops.compressor import compress_windows
from nvfp4_sgl.ops.indexer import write_index_keys
from nvfp4_sgl.ops.rope import inverse_frequencies
from nvfp4_sgl.triton_kernels import compressor
from nvfp4_sgl.triton_kernels.batch import Batch
from nvfp4_sgl.triton_kernels.checks import KernelError
from nvfp4_sgl.triton_kernels.compressor import Compression, Compressor, compress, compress_pair, new_workspace
from nvfp4_sgl.triton_kernels.windows import unit_limit
from tests.triton.support.resources import resources

EPS = 1e-6
FREQUENCIES = inverse_frequencies(64, 160000.0)
POISON = 0xA5
CASES = [(4, 512), (4, 128), (128, 512)]
"""(ratio, n): the main compressor of a CSA layer, its indexer's, that of an HCA layer."""


def bits(x: Tensor) -> Tensor:
    """So that NaN equals NaN."""
    return x.contiguous().view(torch.int32 if x.dtype == torch.float32 else torch.int16)


def state_rows(ratio: int, pages: int, requests: int) -> int:
    return (pages if ratio == 4 else requests + 1) * STATE_RING[ratio]


class Side:
    """A compressor's parameters and its buffers, once for the kernel and once for the reference.

    Everything that is not yet written is NaN, or 0xA5 in packed pages.
    """

    def __init__(self, ratio: int, n: int, pages: int, requests: int, *, packed: bool, state_dtype: torch.dtype):
        generator = torch.Generator().manual_seed(ratio + n)
        width = 2 * n if ratio == 4 else n
        self.compressor = Compressor(
            ratio,
            torch.randn(ratio, width, generator=generator),
            (torch.rand(n, generator=generator) + 0.5).to(torch.bfloat16),
            EPS,
        )
        self.page_size, self.packed, self.n = PAGE_TOKENS // ratio, packed, n
        state = torch.full((state_rows(ratio, pages, requests), 2 * width), torch.nan, dtype=state_dtype)
        self.state, self.expected_state = state, state.clone()
        if packed:
            entry = kv_entry if n == 512 else index_entry
            buffer = torch.full((pages, entry.page_bytes(self.page_size)), POISON, dtype=torch.uint8)
        else:
            buffer = torch.full((pages, self.page_size * n), torch.nan, dtype=torch.bfloat16)
        self.pages, self.expected_pages = buffer, buffer.clone()

    def store(self) -> RowStore:
        if not self.packed:
            return ExactRows(self.expected_pages, self.n)
        rows = PackedKvRows if self.n == 512 else PackedIndexRows
        return rows(self.expected_pages, self.page_size)

    def call(self, kv: Tensor, score: Tensor, device: str) -> Compression:
        self.state, self.pages = self.state.to(device), self.pages.to(device)
        compressor = replace(self.compressor, ape=self.compressor.ape.to(device), norm=self.compressor.norm.to(device))
        return Compression(compressor, kv.to(device), score.to(device), self.state, self.pages, self.page_size)


class World:
    """Sequences of random rows over pages dealt at random; passes of them through the kernel and the reference.

    Page 0 of every pool and request 0 belong to padding, as in SGLang.
    """

    def __init__(
        self,
        cases: Sequence[tuple[int, int]],
        device: str,
        *,
        requests: int = 1,
        capacity: int = 512,
        packed: bool = True,
        dtype: torch.dtype = torch.float32,
        state_dtype: torch.dtype = torch.float32,
    ):
        generator = torch.Generator().manual_seed(1)
        per_request = capacity // PAGE_TOKENS
        count = requests * per_request

        def deal() -> Tensor:
            order = torch.randperm(count, generator=generator) + 1
            return (order[:, None] * PAGE_TOKENS + torch.arange(PAGE_TOKENS)).flatten()

        self.device = device
        self.slots = torch.zeros(requests + 1, capacity, dtype=torch.int32)
        self.slots[1:] = deal().view(requests, capacity).int()
        self.full_to_swa = torch.cat((torch.arange(PAGE_TOKENS), deal()))
        self.lengths = [0] * (requests + 1)
        self.pages = count + 1
        self.sides = [Side(*case, self.pages, requests, packed=packed, state_dtype=state_dtype) for case in cases]
        # Each side's rows are columns of one product, next to other columns.
        widths = [2 * side.compressor.width for side in self.sides]
        self.rows = torch.randn(requests + 1, capacity, sum(widths) + 64, generator=generator) * 2
        self.rows = self.rows.to(dtype)
        self.starts_at = [sum(widths[:i]) + 32 for i in range(len(widths))]
        self.frequencies = FREQUENCIES.to(device)
        self.workspace = new_workspace(capacity * requests, requests + 8, device)

    def columns(self, wide: Tensor, side: int) -> tuple[Tensor, Tensor]:
        width, at = self.sides[side].compressor.width, self.starts_at[side]
        return wide[:, at : at + width], wide[:, at + width : at + 2 * width]

    def batch(self, requests: list[int], starts: list[int], counts: list[int]) -> Batch:
        lengths = torch.tensor(counts)
        owners = torch.repeat_interleave(torch.arange(len(counts)), lengths)
        bounds = torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)))
        positions = torch.tensor(starts)[owners] + torch.arange(len(owners)) - bounds[owners]
        batch = Batch(
            positions=positions,
            owners=owners.int(),
            starts=torch.tensor(starts, dtype=torch.int32),
            bounds=bounds.int(),
            requests=torch.tensor(requests),
            slots=self.slots,
            full_to_swa=self.full_to_swa,
        )
        return Batch(**{name: tensor.to(self.device) for name, tensor in vars(batch).items()})

    def suppose(self, counts: dict[int, int]) -> None:
        """A pass of the reference's that counts as the kernel's, too."""
        self._reference(counts)
        for side in self.sides:
            side.state, side.pages = side.expected_state.clone(), side.expected_pages.clone()

    def run(self, counts: dict[int, int], *, padding: int = 0, pair: bool = False) -> None:
        """A pass that adds ``counts[request]`` tokens, none for 0, and checks the states after it."""
        batch, wide = self.prepare(counts, padding)
        self.launch(self.calls(wide), batch, pair=pair)
        self.check_states(padding=padding > 0)

    def prepare(self, counts: dict[int, int], padding: int = 0) -> tuple[Batch, Tensor]:
        """A pass's arguments, after the reference's side of it."""
        requests = list(counts)
        starts = [self.lengths[request] for request in requests]
        wide = self._reference(counts)
        batch = self.batch(requests + [0] * padding, starts + [0] * padding, [*counts.values(), *[1] * padding])
        wide = torch.cat((wide, torch.full((padding, wide.shape[1]), 7.0, dtype=wide.dtype)))
        return batch, wide.to(self.device)

    def calls(self, wide: Tensor) -> list[Compression]:
        return [side.call(*self.columns(wide, i), self.device) for i, side in enumerate(self.sides)]

    def launch(self, calls: list[Compression], batch: Batch, *, pair: bool = False) -> None:
        if pair:
            compress_pair(calls[0], calls[1], batch, self.frequencies)
            calls = calls[2:]
        for call in calls:
            compress(call, batch, self.frequencies, workspace=self.workspace)

    def check_states(self, *, padding: bool = False) -> None:
        """The first ring is the padding's."""
        for side in self.sides:
            unused = STATE_RING[side.compressor.ratio] if padding else 0
            assert torch.equal(bits(side.state.cpu()[unused:]), bits(side.expected_state[unused:]))

    def _reference(self, counts: dict[int, int]) -> Tensor:
        """The pass on the reference's side; the rows of its tokens."""
        added = [request for request, count in counts.items() if count]
        if not added:
            return self.rows[0, :0]
        starts = [self.lengths[request] for request in added]
        for request in added:
            self.lengths[request] += counts[request]
        ends = [self.lengths[request] for request in added]
        wide = torch.cat([self.rows[r, a:b] for r, a, b in zip(added, starts, ends, strict=True)])
        chosen = torch.tensor(added)
        batch = ReferenceBatch(
            torch.tensor(starts), torch.tensor(ends), chosen, self.slots[chosen].long(), self.full_to_swa
        )
        plan = plan_batch(batch, window=128, ratios=frozenset(s.compressor.ratio for s in self.sides))
        for i, side in enumerate(self.sides):
            kv, score = self.columns(wide.float(), i)
            closing = plan.compress[side.compressor.ratio]
            entries = compress_windows(
                *(kv, score, side.expected_state, closing),
                ape=side.compressor.ape,
                norm=side.compressor.norm,
                norm_eps=EPS,
                frequencies=FREQUENCIES,
            )
            if side.n == 128:
                write_index_keys(side.store(), closing.window_slots, entries)
            else:
                side.store().write(closing.window_slots, entries)
        return wide

    def check_entries(self) -> None:
        for side in self.sides:
            check_entries(side.pages.cpu(), side.expected_pages, side)


def check_entries(found: Tensor, expected: Tensor, side: Side) -> None:
    """Within one unit of the format, rarely; nothing written but what the reference writes."""
    if not side.packed:
        check_bf16(found, expected)
        return
    layout = (kv_entry if side.n == 512 else index_entry).LAYOUT
    data, scales = (part.flatten(0, 1) for part in layout.regions(found, side.page_size))
    expected_data, expected_scales = (part.flatten(0, 1) for part in layout.regions(expected, side.page_size))
    written = (expected_data != POISON).any(dim=1)
    assert bool((data[~written] == POISON).all()) and bool((scales[~written] == POISON).all())
    data, scales, expected_data, expected_scales = (
        part[written] for part in (data, scales, expected_data, expected_scales)
    )
    distance = (steps(data) - steps(expected_data)).abs()
    if side.n == 128:
        found_scales, scales = (s.contiguous().view(torch.float32) for s in (scales, expected_scales))
        torch.testing.assert_close(found_scales, scales, rtol=2**-18, atol=0.0)
    else:
        check_bf16(*(d[:, 448:].contiguous().view(torch.bfloat16) for d in (data, expected_data)))
        exponents = (scales.int() - expected_scales.int()).abs()
        assert bool((exponents <= 1).all()) and is_rare(exponents != 0)
        distance = distance[:, :448].unflatten(1, (7, 64))[exponents[:, :7] == 0]
    assert bool((distance <= 1).all()) and is_rare(distance != 0)


def steps(codes: Tensor) -> Tensor:
    """E4M3 codes, uint8, as integers in the order of their values; both zeros are 0."""
    return torch.where(codes < 128, codes.int(), 128 - codes.int())


def is_rare(different: Tensor) -> bool:
    return int(different.sum()) <= 1 + different.numel() // 1000


def check_bf16(found: Tensor, expected: Tensor) -> None:
    """One unit of bf16, rarely; where a rotation cancels, what fp32 loses there."""
    torch.testing.assert_close(found, expected, rtol=2**-7, atol=2**-18, equal_nan=True)
    assert is_rare(bits(found) != bits(expected))


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
    monkeypatch.setattr(compressor, "PROGRAMS", 2)
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
    if device == "cuda":
        pytest.skip("a GPU's order is its own")
    builder, forwards = interpreter.interpreter_builder, interpreter.InterpreterBuilder.set_grid_idx

    def backwards(x: int, y: int, z: int) -> None:
        forwards(builder, *(size - 1 - i for size, i in zip(builder.grid_dim, (x, y, z), strict=True)))

    monkeypatch.setattr(builder, "set_grid_idx", backwards)
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
        (hca, "workspace: expected one"),
    ]:
        with pytest.raises(KernelError, match=message):
            compress(call, batch, FREQUENCIES)
    with pytest.raises(KernelError, match="at least 1 units, found 0"):
        compress(hca, batch, FREQUENCIES, workspace=new_workspace(0, 0, "cpu"))
    with pytest.raises(KernelError, match="ratio of index"):
        compress_pair(csa, hca, batch, FREQUENCIES)
    with pytest.raises(KernelError, match="frequencies: expected shape"):
        compress_pair(csa, index, batch, FREQUENCIES[:8])


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
        for name, tensor in vars(batch).items():
            tensor.copy_(getattr(next_batch, name))
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
    full_to_swa = torch.zeros((last + 1) * PAGE_TOKENS, dtype=torch.int64, device=device)
    full_to_swa[shift:] = batch.full_to_swa + shift
    far = replace(batch, slots=batch.slots + shift, full_to_swa=full_to_swa)
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
        compress_pair(csa, index, batch, FREQUENCIES)
        compress(hca, batch, FREQUENCIES, workspace=world.workspace)


@pytest.mark.parametrize("architecture", [90, 100])
def test_kernels_fit(architecture: int):
    found = [usage for usage in resources(__name__) if usage.architecture == architecture]
    assert len(found) == 5  # prefill and decode, and of HCA decode by one token and by eight
    for usage in found:
        # sin and cos of large angles keep their reduction in a small array and are polynomials of fused steps.
        assert usage.local == 0 and usage.stack <= 40
        assert usage.count("fma.rn.f32") == 0
        if usage.kernel == "compress_hca_kernel":
            assert usage.count("atom.global.gpu.acq_rel.add") == 1
