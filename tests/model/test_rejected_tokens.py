"""Passes of which the last tokens are rejected leave behind what serial decoding leaves: state by state, and by logits.

A pass of several tokens writes entries, window rows and compressor states of tokens that turn out wrong. The next pass
begins at the first of them. Nothing is restored: rings are long enough that nothing needed was overwritten.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from nvfp4_sgl.cache.layout import DRAFTED_STATE_RING, STATE_RING, Rings, state_row
from nvfp4_sgl.cache.plan import Batch, plan_batch
from nvfp4_sgl.ops.compressor import compress_windows
from nvfp4_sgl.ops.rope import inverse_frequencies
from nvfp4_sgl.standalone import Standalone
from nvfp4_sgl.synthetic.tiny import write_tiny

SIZE, ROWS = 16, 420
"""Channels of an entry, and tokens of the longest sequence here."""
WIDEST = 10
"""Tokens of the widest pass that the rings are made for."""


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


class Compressor:
    """One compressor with random rows; passes may end with rows that are not the sequence's."""

    def __init__(self, ratio: int, rings: Rings):
        generator = torch.Generator().manual_seed(ratio)
        width = 2 * SIZE if ratio == 4 else SIZE
        self.ratio, self.rings = ratio, rings
        self.truth = torch.randn(2, ROWS, width, generator=generator)
        self.wrong = torch.Generator().manual_seed(1)
        self.ape, self.norm = torch.randn(ratio, width, generator=generator), torch.rand(SIZE, generator=generator)
        self.state = torch.full((2048 // 256 * 256, 2 * width), float("nan"))
        self.slots = torch.arange(256, 256 + 512).view(1, -1)
        self.entries: dict[int, Tensor] = {}

    def run(self, start: int, right: int, end: int) -> None:
        """Positions ``start`` to ``end`` − 1, of which those from ``right`` on will be rejected."""
        one, swa = torch.tensor([1]), torch.arange(int(self.slots.max()) + 1)
        batch = Batch(torch.tensor([start]), torch.tensor([end]), one, self.slots, swa)
        plan = plan_batch(batch, window=16, ratios=frozenset({self.ratio}), rings=self.rings).compress[self.ratio]
        rows = self.truth[:, start:end].clone()
        rows[:, right - start :] = torch.randn(rows[:, right - start :].shape, generator=self.wrong)
        kv, score = rows
        turns = inverse_frequencies(4, 10000.0)
        scales = {"ape": self.ape, "norm": self.norm, "norm_eps": 1e-6, "frequencies": turns}
        made = compress_windows(kv, score, self.state, plan, **scales)  # type: ignore[arg-type]
        self.entries |= dict(zip(plan.window_slots.tolist(), made, strict=True))

    def open_rows(self, length: int) -> Tensor:
        """The states that the next windows to close need, behind a sequence of ``length`` tokens."""
        oldest = max(length // self.ratio * self.ratio - (4 if self.ratio == 4 else 0), 0)
        positions = torch.arange(oldest, length)
        swa = self.slots[0, positions]
        request = torch.tensor(1)
        return self.state[state_row(self.ratio, request=request, position=positions, swa_slot=swa, rings=self.rings)]

    def kept_entries(self, length: int) -> dict[int, Tensor]:
        """Entries of windows that are complete after ``length`` tokens."""
        last = int(self.slots[0, length - 1])
        return {slot: entry for slot, entry in self.entries.items() if (slot + 1) * self.ratio - 1 <= last}


def differs(ratio: int, rings: Rings, first: int, right: int, width: int) -> bool:
    """Whether drafting from ``first`` on leaves other states or entries; passes of ``width`` tokens, some ``right``."""
    serial, drafted = (Compressor(ratio, rings) for _ in range(2))
    for each in (serial, drafted):
        each.run(0, first, first)
    length = first
    for _ in range(3):
        drafted.run(length, length + right, length + width)
        for position in range(length, length + right):
            serial.run(position, position + 1, position + 1)
        length += right
        theirs, ours = serial.kept_entries(length), drafted.kept_entries(length)
        if not torch.equal(serial.open_rows(length), drafted.open_rows(length)) or theirs.keys() != ours.keys():
            return True
        if any(not torch.equal(theirs[slot], ours[slot]) for slot in theirs):
            return True
    return False


FIRST = [*range(9, 13), 120, *range(124, 130), 253]
"""Where drafting begins: every residue of 4, around the end of a window of 128 and of a page."""


@pytest.mark.parametrize("ratio", [4, 128])
@pytest.mark.parametrize("width", [2, 3, 6, WIDEST])
def test_states_are_those_of_serial_decoding(ratio: int, width: int) -> None:
    for first in FIRST:
        for right in {1, 2, 3, width - 1, width} & {*range(1, width + 1)}:
            assert not differs(ratio, DRAFTED_STATE_RING, first, right, width), (first, right)


@pytest.mark.parametrize(("ratio", "width"), [(4, 6), (128, 3)])
def test_rings_of_a_run_without_drafts_are_too_short(ratio: int, width: int) -> None:
    assert any(differs(ratio, STATE_RING, first, right, width) for first in FIRST for right in range(1, width))


LENGTH, PROMPT, WIDTH = 150, 118, 6
"""Tokens of the sequence, and of its undrafted prompt; a window of 128 ends in between."""


@pytest.fixture(scope="module", params=[False, True], ids=["exact", "packed"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Standalone:
    """One for each kind of rows."""
    path: Path = tmp_path_factory.mktemp("tiny")
    write_tiny(path, "nvfp4-full", seed=4, num_hidden_layers=4, n_routed_experts=8)
    return Standalone(path, requests=1, capacity=256, packed=request.param, rings=DRAFTED_STATE_RING)


@pytest.fixture(scope="module")
def serial(model: Standalone) -> tuple[list[int], Tensor]:
    """A sequence whose tokens behind the prompt are the likeliest, and all log-probabilities."""
    with torch.no_grad():
        model.reset()
        ids = torch.randint(2, model.config.vocab_size, (PROMPT,), generator=torch.Generator().manual_seed(2)).tolist()
        rows = [model.extend({0: ids})[0]]
        while len(ids) < LENGTH:
            ids.append(int(rows[-1][-1].argmax()))
            rows.append(model.extend({0: ids[-1:]})[0])
        return ids, torch.cat(rows).log_softmax(-1)


Accept = Callable[[int], int]
"""How many of a pass's drafts are right, by the number of the pass."""
POLICIES: dict[str, Accept] = {
    "all right": lambda number: WIDTH - 1,
    "all wrong": lambda number: 0,
    "in turn": lambda number: number % WIDTH,
    "at random": lambda number: int(torch.randint(WIDTH, (1,), generator=torch.Generator().manual_seed(number))),
}


@pytest.mark.parametrize("name", POLICIES)
def test_log_probabilities_are_those_of_serial_decoding(
    name: str, model: Standalone, serial: tuple[Sequence[int], Tensor]
) -> None:
    """Greedy drafts accepted as far as they are right; behind them another token than the likeliest."""
    ids, expected = serial
    model.reset()
    model.extend({0: ids[:PROMPT]})
    length, number, worst = PROMPT, 0, 0.0
    while length + WIDTH <= LENGTH:
        right = POLICIES[name](number)
        drafts = ids[length + 1 : length + WIDTH]
        drafts[right:] = [(token + 1) % model.config.vocab_size for token in drafts[right:]]
        found = model.extend({0: [ids[length], *drafts]})[0].log_softmax(-1)
        accepted = 0
        while accepted < len(drafts) and int(found[accepted].argmax()) == drafts[accepted]:
            accepted += 1
        assert accepted == right
        kept = slice(length, length + accepted + 1)
        worst = max(worst, float((found[: accepted + 1] - expected[kept]).abs().max()))
        length, number = length + accepted + 1, number + 1
        model.caches.take_back(0, length)
    assert number >= 5 and worst < 1e-4, worst


def stored_rows(model: Standalone, length: int) -> list[Tensor]:
    """What a pass behind ``length`` tokens may read: window rows, entries, index keys and open states, by layer."""
    slots, to_swa = model.caches.slots[0, :length], model.caches.full_to_swa
    window = to_swa[slots[max(length - model.config.sliding_window, 0) :]]
    found = []
    for layer, cache in zip(model.config.layers(), model.caches.layers, strict=True):
        found.append(cache.swa.read(window))
        if cache.compressed is None:
            continue
        ratio = layer.ratio
        entries = slots[: length // ratio * ratio : ratio] // ratio
        stores = (cache.compressed, cache.index) if len(entries) else ()
        found += [store.read(entries) for store in stores if store is not None]
        open_ones = torch.arange(max(length // ratio * ratio - (4 if ratio == 4 else 0), 0), length)
        swa, request = to_swa[slots[open_ones]], torch.tensor(0)
        rows = state_row(ratio, request=request, position=open_ones, swa_slot=swa, rings=DRAFTED_STATE_RING)
        found += [state[rows] for state in (cache.state, cache.index_state) if state is not None]
    return found


def changed(found: Tensor, expected: Tensor) -> float:
    """Share of a row's values that differ by more than rounding, in the row where it is largest; stale rows give 1."""
    bound = 1e-3 * expected.abs().amax(-1, keepdim=True)
    return 0.0 if not expected.numel() else float(((found - expected).abs() > bound).float().mean(-1).max())


CHANGED = 0.02
"""Bound of :func:`changed`. Sums of a pass of several tokens take another order, by which an 8-bit value may round the
other way."""


@pytest.fixture(scope="module")
def serial_rows(model: Standalone, serial: tuple[Sequence[int], Tensor]) -> dict[int, list[Tensor]]:
    """What serial decoding has stored, by the sequence's length."""
    with torch.no_grad():
        model.reset()
        model.extend({0: serial[0][:PROMPT]})
        found = {}
        for length in range(PROMPT + 1, LENGTH + 1):
            model.extend({0: serial[0][length - 1 : length]})
            found[length] = stored_rows(model, length)
        return found


@pytest.mark.parametrize("taken_back", [True, False], ids=["taken back", "left"])
def test_stored_rows_are_those_of_serial_decoding(
    taken_back: bool,
    model: Standalone,
    serial: tuple[Sequence[int], Tensor],
    serial_rows: dict[int, list[Tensor]],
) -> None:
    """All that later passes read, after every rejection; a token that is wrongly left in the sequence is seen."""
    ids, _ = serial
    model.reset()
    model.extend({0: ids[:PROMPT]})
    length, number, worst = PROMPT, 0, 0.0
    while length + WIDTH < LENGTH:
        right = number % WIDTH
        drafts = ids[length + 1 : length + WIDTH]
        drafts[right:] = [(token + 1) % model.config.vocab_size for token in drafts[right:]]
        model.extend({0: [ids[length], *drafts]})
        length, number = length + right + 1, number + 1
        if not taken_back and right < WIDTH - 1:
            length += 1
        model.caches.take_back(0, length)
        for found, rows in zip(stored_rows(model, length), serial_rows[length], strict=True):
            worst = max(worst, changed(found, rows))
    assert (worst < CHANGED) is taken_back, worst
