"""Prompt passes of a fixed shape: which shape a pass takes, and how it is padded."""

from __future__ import annotations

import pytest
import torch

from nvfp4_sgl.config import ModelConfig
from nvfp4_sgl.model.contract import PassKind, PassRequest
from nvfp4_sgl.model.static_prompt import PromptSize, StaticPrompt, choose, shapes, unscored_length
from nvfp4_sgl.prompt_sizes import REQUESTS, TOKENS
from nvfp4_sgl.synthetic.tiny_config import TinyFormat, tiny_config
from nvfp4_sgl.targets.fused.step import index_entries

LONGEST = 16384
UNSCORED = 2051


def served() -> list[PromptSize]:
    return shapes(TOKENS, REQUESTS, longest=LONGEST, columns=LONGEST + 4, unscored=UNSCORED)


def test_each_number_of_tokens_has_two_shapes_the_largest_first():
    found = [(shape.tokens, shape.longest) for shape in served()]
    assert found == [(tokens, longest) for tokens in reversed(TOKENS) for longest in (LONGEST, UNSCORED)]
    assert {shape.requests for shape in served()} == {REQUESTS}


@pytest.mark.parametrize(
    ("longest", "unscored", "lengths"),
    [(4096, None, {4096}), (1024, UNSCORED, {1024}), (UNSCORED, UNSCORED, {UNSCORED}), (4096, 259, {259, 4096})],
)
def test_where_the_index_has_no_choice_one_shape_does(longest: int, unscored: int | None, lengths: set[int]):
    found = shapes((256,), 4, longest=longest, columns=longest, unscored=unscored)
    assert len(found) == len(lengths) and {shape.longest for shape in found} == lengths


def test_padding_stays_within_the_table_of_slots():
    assert {shape.tokens for shape in shapes(TOKENS, 4, longest=4096, columns=1000)} == {256, 512}
    assert {shape.tokens for shape in shapes(TOKENS, 4, longest=600, columns=4096)} == {256, 512}


TABLE = {
    (1, 1, 1): (256, UNSCORED),
    (256, 1, 256): (256, UNSCORED),
    (257, 1, 257): (512, UNSCORED),
    (1024, 1, UNSCORED): (1024, UNSCORED),
    (1024, 1, UNSCORED + 1): (1024, LONGEST),
    (40, 1, LONGEST): (256, LONGEST),
    (2048, 1, 2048): (2048, UNSCORED),
    (2048, 1, 9000): (2048, LONGEST),
    # Padding is a request, too; a pass without any needs none.
    (200, REQUESTS - 1, 100): (256, UNSCORED),
    (200, REQUESTS, 100): None,
    (256, REQUESTS, 100): (256, UNSCORED),
    (2048, REQUESTS + 1, 300): None,
    (2049, 1, 2049): None,
    (8192, 3, 8192): None,
    (300, 1, LONGEST + 1): None,
}
"""(tokens, requests, longest) of a pass, and (tokens, longest) of its shape; ``None`` runs eagerly."""


@pytest.mark.parametrize("found", TABLE)
def test_a_pass_takes_the_least_shape_that_holds_it(found: tuple[int, int, int]):
    expected = TABLE[found]
    assert choose(served(), *found) == (expected and PromptSize(expected[0], REQUESTS, expected[1]))


@pytest.mark.parametrize("topk", [64, 100, 128, 512])
def test_unscored_sequences_are_those_of_which_an_eager_pass_scores_nothing(topk: int):
    """``FusedSelection`` scores where the room has more entries than the index chooses."""
    config = ModelConfig.from_dict(tiny_config(TinyFormat.NVFP4_FULL, {"index_topk": topk}), source="test")
    longest = unscored_length(config)
    assert longest is not None
    assert index_entries(longest) <= topk < index_entries(longest + 1)


def test_an_index_of_less_than_a_page_always_scores():
    config = ModelConfig.from_dict(tiny_config(TinyFormat.NVFP4_FULL, {"index_topk": 16}), source="test")
    assert unscored_length(config) is None and index_entries(1) > 16


def pass_of(starts: list[int], added: list[int]) -> PassRequest:
    """Requests 1, 2, … that have so many tokens, and add so many."""
    ends = torch.tensor(starts) + torch.tensor(added)
    positions = torch.cat([torch.arange(start, start + count) for start, count in zip(starts, added, strict=True)])
    requests, new = 1 + torch.arange(len(starts)), torch.tensor(added, dtype=torch.int32)
    return PassRequest(positions, requests, ends, PassKind.EXTEND, new, longest=int(ends.max()))


def contents(prompt: StaticPrompt) -> list[list[int]]:
    request = prompt.request
    assert request.added is not None
    return [one.tolist() for one in (request.positions, request.requests, request.ends, request.added)]


def test_at_first_all_is_padding():
    prompt = StaticPrompt(PromptSize(4, 2, 64), "cpu", padding_request=9)
    assert contents(prompt) == [[0, 1, 2, 3], [9, 9], [4, 0], [4, 0]]
    assert prompt.request.longest == 64 and prompt.request.kind is PassKind.EXTEND


def test_what_is_missing_is_one_request_of_padding():
    prompt = StaticPrompt(PromptSize(8, 4, 64), "cpu")
    addresses = [one.data_ptr() for one in (prompt.ids, prompt.request.positions, prompt.request.added)]
    prompt.load(pass_of([10, 0], [2, 3]))
    prompt.load_ids(torch.tensor([5, 6, 7, 8, 9]))
    assert contents(prompt) == [[10, 11, 0, 1, 2, 0, 1, 2], [1, 2, 0, 0], [12, 3, 3, 0], [2, 3, 3, 0]]
    assert prompt.ids.tolist() == [5, 6, 7, 8, 9, 0, 0, 0] and prompt.used == 5
    prompt.load(pass_of([40], [8]))  # nothing of the pass before is left
    prompt.load_ids(torch.arange(8))
    assert contents(prompt) == [[*range(40, 48)], [1, 0, 0, 0], [48, 0, 0, 0], [8, 0, 0, 0]]
    prompt.load(pass_of([0], [2]))
    prompt.load_ids(torch.tensor([3, 4]))
    assert contents(prompt) == [[0, 1, 0, 1, 2, 3, 4, 5], [1, 0, 0, 0], [2, 6, 0, 0], [2, 6, 0, 0]]
    assert prompt.ids.tolist() == [3, 4, 0, 0, 0, 0, 0, 0]
    assert [one.data_ptr() for one in (prompt.ids, prompt.request.positions, prompt.request.added)] == addresses


@pytest.mark.parametrize("late", [pass_of([0], [9]), pass_of([62], [3]), pass_of([0] * 4, [1] * 4)])
def test_a_pass_that_does_not_fit_is_refused(late: PassRequest):
    prompt = StaticPrompt(PromptSize(8, 4, 64), "cpu")
    with pytest.raises(AssertionError, match=r"PromptSize\(tokens=8"):
        prompt.load(late)


def test_ids_of_another_pass_are_refused():
    prompt = StaticPrompt(PromptSize(8, 4, 64), "cpu")
    prompt.load(pass_of([0], [3]))
    with pytest.raises(AssertionError, match="expected the ids of 3 tokens, found 2"):
        prompt.load_ids(torch.tensor([1, 2]))
