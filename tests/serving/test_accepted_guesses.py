"""What a round accepts is distributed as what the target alone would answer; SGLang's kernels, in torch, by hand."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from nvfp4_sgl.ops import drafts
from nvfp4_sgl.ops.drafts import Accepted
from nvfp4_sgl.ops.greedy import FAILED
from nvfp4_sgl.serving import finite_logits
from nvfp4_sgl.serving.drafts import accept, chain, dspark_accept
from nvfp4_sgl.serving.drafts.penalties import Penalties
from nvfp4_sgl.serving.sglang import parallel, scheduling
from nvfp4_sgl.triton_kernels.logits import accept as kernel

VOCABULARY, ROWS, SEQUENCES = 5, 3, 20_000
TARGET = torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(1))
"""Logits of the token behind each."""
GUESS = torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(2)).argmax(-1)
"""The draft's token behind each."""
TEMPERATURE = 0.7
BOUND = 51.2
"""Bound of chi-square with 24 degrees of freedom: a right distribution exceeds it once in 1000."""

Accept = Callable[[Tensor, Tensor], Accepted]


@pytest.fixture
def sampler(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's sampler without a server."""
    from sglang.srt.layers.sampler import Sampler

    made = Sampler.__new__(Sampler)
    torch.nn.Module.__init__(made)
    for name in ("rl_on_policy_target", "tp_sync_group", "cp_sync_group"):
        setattr(made, name, None)
    for name in ("enable_deterministic", "use_log_softmax_logprob", "use_ascend_backend"):
        setattr(made, name, False)
    monkeypatch.setattr(accept, "_sampler", lambda: made)


def sampling_info(requests: int) -> Any:
    return scheduling.sampling_info(
        temperatures=torch.full((requests, 1), TEMPERATURE),
        top_ps=torch.ones(requests),
        top_ks=torch.full((requests,), 1 << 30),
        min_ps=torch.zeros(requests),
        is_all_greedy=False,
        is_any_greedy=False,
        need_top_p_sampling=False,
        need_top_k_sampling=False,
        need_min_p_sampling=False,
        vocab_size=VOCABULARY,
        device="cpu",
    )


def accepted(guesses: Tensor, sampled: Tensor) -> Accepted:
    """Accept guesses of requests without keys."""
    return drafts.accept_guesses(guesses, sampled, torch.zeros(len(guesses), dtype=torch.int64))


def answers(accept_rows: Accept, tokens: int = 3) -> Tensor:
    """The first ``tokens`` of so many answers behind token 0, int [SEQUENCES, tokens], round after round."""
    said, lengths = torch.zeros(SEQUENCES, tokens + ROWS + 1, dtype=torch.int64), torch.ones(SEQUENCES).long()
    info = sampling_info(SEQUENCES)
    while (lengths <= tokens).any():
        last = said.gather(1, (lengths - 1)[:, None])[:, 0]
        guesses = torch.stack([last, GUESS[last], GUESS[GUESS[last]]], 1)
        logits = TARGET[guesses].flatten(0, 1)
        sampled = accept.sample_rows(logits, info, ROWS, torch.zeros(len(logits))).view_as(guesses).long()
        count = accept_rows(guesses, sampled).lengths
        for row in range(ROWS):
            here = (row < count) & (lengths <= tokens)
            said[here, lengths[here]] = sampled[here, row]
            lengths += here
    return said[:, 1 : tokens + 1]


def chi_square(found: Tensor) -> float:
    """Counts of the last two of three tokens; the first is drawn, too."""
    p = (TARGET / TEMPERATURE).softmax(-1).double()
    expected = SEQUENCES * ((p[0] @ p)[:, None] * p)
    counts = torch.bincount(found[:, 1] * VOCABULARY + found[:, 2], minlength=VOCABULARY**2).view_as(expected)
    return float(((counts - expected) ** 2 / expected).sum())


def test_answers_are_distributed_as_without_drafts(sampler: None) -> None:
    torch.manual_seed(0)
    assert chi_square(answers(accepted)) < BOUND


def lenient(guesses: Tensor, sampled: Tensor) -> Accepted:
    """One in thirty wrong guesses is taken for right."""
    spared = (guesses[:, 1:] != sampled[:, :-1]) & (torch.rand(len(guesses), ROWS - 1) < 1 / 30)
    sampled[:, :-1] = sampled[:, :-1].where(~spared, guesses[:, 1:])
    return accepted(guesses, sampled)


def drawn_again(guesses: Tensor, sampled: Tensor) -> Accepted:
    """The token behind a wrong guess is drawn anew, so that it may be the guess."""
    wrong = guesses[:, 1:] != sampled[:, :-1]
    again = (TARGET[guesses[:, :-1]] / TEMPERATURE).softmax(-1).flatten(0, 1).multinomial(1).view_as(wrong)
    found = accepted(guesses, sampled)
    sampled[:, :-1] = sampled[:, :-1].where(~wrong, again)
    return found


@pytest.mark.parametrize("mistake", [lenient, drawn_again])
def test_a_bias_is_seen(sampler: None, mistake: Accept) -> None:
    torch.manual_seed(0)
    assert chi_square(answers(mistake)) > BOUND


def test_rows_are_sampled_as_their_request_asks() -> None:
    info = sampling_info(2)
    info.temperatures, info.top_ks = torch.tensor([[0.5], [2.0]]), torch.tensor([3, 7])
    rows = accept.repeated(info, 2)
    assert rows.temperatures.tolist() == [[0.5], [0.5], [2.0], [2.0]] and rows.top_ks.tolist() == [3, 3, 7, 7]


@pytest.mark.parametrize("name", ["is_any_greedy", "need_top_p_sampling", "need_top_k_sampling", "need_min_p_sampling"])
def test_rows_are_filtered_as_their_batch_is(name: str) -> None:
    """The sampler reads top-k, top-p and min-p where the batch says that a request asks for them."""
    info = sampling_info(2)
    for value in (True, False):
        setattr(info, name, value)
        assert getattr(accept.repeated(info, 2), name) is value


def test_zeros_of_more_requests_than_a_round_had_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are held between rounds, and a larger batch needs more."""
    monkeypatch.setattr(dspark_accept, "_zeros", {})
    for requests in (3, 5000, 3):
        lengths = torch.full((requests,), 2, dtype=torch.int32)
        assert torch.equal(dspark_accept.none_trimmed(lengths), torch.zeros_like(lengths))


def test_log_probabilities_of_a_row_that_failed_are_those_of_a_token() -> None:
    """-1 would be read in front of the vocabulary; SGLang takes the request's failure from the tokens."""
    predicted, seen = torch.tensor([3, -1, 0]), list[list[int]]()
    accept.log_probabilities(lambda batch, output, tokens: seen.append(tokens.tolist()), None, None, predicted)
    assert seen == [[3, 0, 0]] and predicted.tolist() == [3, -1, 0]


def test_rows_of_greedy_requests_are_the_likeliest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is read that says how to draw, and the sampler is asked for agreement alone."""
    agreed: list[Tensor] = []
    sampler = SimpleNamespace(_sync_token_ids_across_tp=lambda tokens, info: agreed.append(tokens))
    monkeypatch.setattr(accept, "_sampler", lambda: sampler)
    info, logits = sampling_info(8), torch.randn(8 * ROWS, VOCABULARY, generator=torch.Generator().manual_seed(3))
    info.is_all_greedy = True
    logits[5, 2] = torch.nan
    expected = logits.argmax(-1)
    expected[5] = FAILED
    sampled = accept.sample_rows(logits, info, ROWS, None)
    assert torch.equal(sampled, expected) and agreed[0] is sampled
    assert not logits[5].any()


def verified(requests: int, *, logprobs: bool = False) -> tuple[Any, Any, Any]:
    """SGLang's input, batch and output of a verify pass of several requests that draw their tokens."""
    generator = torch.Generator().manual_seed(5)
    guesses = torch.randint(0, VOCABULARY, (requests, ROWS), generator=generator)
    lengths = torch.arange(PROMPT, PROMPT + requests)
    batch = SimpleNamespace(
        forward_mode=SimpleNamespace(is_idle=lambda: False),
        sampling_info=sampling_info(requests),
        seq_lens=lengths,
        reqs=[request([1])] * requests,
        return_logprob=logprobs,
    )
    verify_input = SimpleNamespace(
        draft_token=guesses.flatten(),
        draft_token_num=ROWS,
        positions=(lengths[:, None] + torch.arange(ROWS)).flatten(),
    )
    return verify_input, batch, scheduling.logits_output(TARGET[guesses].flatten(0, 1))


@pytest.mark.parametrize("blocks", [False, True], ids=["EAGLE", "DSPARK"])
def test_ranks_accept_what_the_first_one_has_drawn(
    blocks: bool, sampler: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each would draw for itself; the number of accepted rows follows from the tokens that all have."""
    of_first: list[Tensor] = []

    class Group:
        def broadcast(self, tensor: Tensor, src: int) -> None:
            assert src == 0 and tensor.is_contiguous()
            if of_first:
                tensor.copy_(of_first[0])
            else:
                of_first.append(tensor.clone())

    found = {"get_parallel": lambda: SimpleNamespace(tp_size=2), "get_tp_group": Group}
    monkeypatch.setattr(parallel, "find", found.__getitem__)
    rounds: list[tuple[Tensor, ...]] = []
    for rank in range(2):
        torch.manual_seed(rank)
        verify_input, batch, output = verified(50)
        if blocks:
            guesses = verify_input.draft_token.view(-1, ROWS)
            block = accepted_block(output.next_token_logits, guesses, batch.seq_lens, batch.sampling_info)
            rounds.append((block.out_tokens, block.commit_lens))
        else:
            rounds.append(accept.sample_round(print, verify_input, batch, output))
    for first, second in zip(*rounds, strict=True):
        assert torch.equal(first, second)
    assert len(of_first) == 1 and 1 < rounds[0][1].float().mean() < ROWS


def accepted_block(logits: Tensor, guesses: Tensor, lengths: Tensor, info: Any) -> Any:
    """What a round of DSpark gives."""
    executor = SimpleNamespace(nvfp4_sgl_penalties=Penalties(guesses, lengths, [request([1])] * len(guesses)))
    return dspark_accept.accept(
        print, executor, verify_ids_2d=guesses, target_logits=logits, sampling_info=info, prefix_lens=lengths
    )


def test_log_probabilities_are_made_of_logits_that_no_sampler_has_overwritten(
    sampler: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parallel, "tp_size", lambda: 1)
    verify_input, batch, output = verified(4, logprobs=True)
    logits = output.next_token_logits.clone()
    accept.sample_round(print, verify_input, batch, output)
    assert torch.equal(output.next_token_logits, logits)
    guesses = verify_input.draft_token.view(-1, ROWS)
    accepted_block(output.next_token_logits, guesses, batch.seq_lens, batch.sampling_info)
    assert torch.equal(output.next_token_logits, logits)


def test_rows_of_a_block_are_drawn_by_their_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is drawn by a seed follows from the position: that of the row's token, as in a pass of its own."""
    monkeypatch.setattr(parallel, "tp_size", lambda: 1)
    monkeypatch.setattr(accept, "_sampler", lambda: lambda output, info, logprob, top, ids, positions: positions)
    verify_input, batch, output = verified(40)
    guesses = verify_input.draft_token.view(-1, ROWS)
    found = accepted_block(output.next_token_logits, guesses, batch.seq_lens, batch.sampling_info)
    assert torch.equal(found.out_tokens.flatten(), verify_input.positions)


@pytest.mark.parametrize("blocks", [False, True], ids=["EAGLE", "DSPARK"])
def test_every_row_has_what_its_request_asks_for(blocks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bias and penalties, and in EAGLE's round the mask of grammars, which DSpark's worker applies itself."""
    monkeypatch.setattr(parallel, "tp_size", lambda: 1)
    monkeypatch.setattr(accept, "sample_rows", lambda logits, *_: logits.argmax(-1))
    verify_input, batch, output = verified(2)
    guesses, info = verify_input.draft_token.view(-1, ROWS), batch.sampling_info
    bias = torch.randn(2, VOCABULARY, generator=torch.Generator().manual_seed(6))
    info.logit_bias = bias
    batch.reqs = [request([1], **asked) for asked in ({"frequency_penalty": 0.5}, {})]
    expected = output.next_token_logits.clone().view(2, ROWS, VOCABULARY) + bias[:, None]
    for row in range(ROWS):
        for token in guesses[0, : row + 1]:
            expected[0, row, token] -= 0.5
    if blocks:
        executor, given = SimpleNamespace(), list[Any]()

        def passed(_: Any, *, sampling_info: Any, **rest: Any) -> Any:
            given.append(sampling_info)
            return SimpleNamespace(logits_output=output)

        dspark_accept.verify(passed, executor, batch=batch, verify_ids_2d=guesses, sampling_info=info)
        assert given == [None], "SGLang would apply them to all rows alike, again"
    else:
        mask = SimpleNamespace(apply=lambda logits: logits[:, 3].fill_(-torch.inf))
        expected[:, :, 3] = -torch.inf
        _, lengths, _ = accept.sample_round(print, verify_input, batch, output, mask)
        tokens = guesses[0, : int(lengths[0])]
        counts = batch.reqs[0].nvfp4_sgl_answer.counts
        assert counts.tolist() == torch.bincount(tokens, minlength=VOCABULARY).tolist(), "the next round counts on"
    found = output.next_token_logits.view_as(expected)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


def test_the_first_wrong_guess_ends_a_round() -> None:
    generator = torch.Generator().manual_seed(3)
    guesses, sampled = (torch.randint(0, 3, (200, 4), generator=generator) for _ in range(2))
    starts = torch.randint(0, 1000, (200,), generator=generator)
    found = drafts.accept_guesses(guesses, sampled, starts)
    assert torch.equal(found.tokens, sampled)
    for request, (theirs, ours) in enumerate(zip(guesses.tolist(), sampled.tolist(), strict=True)):
        count = 1
        while count < 4 and theirs[count] == ours[count - 1]:
            count += 1
        places = [4 * request + row if row < count else -1 for row in range(4)]
        assert found.lengths[request] == count == found.right[request] + 1
        assert found.places[request].tolist() == places
        assert found.last[request] == ours[count - 1] and found.ends[request] == starts[request] + count


def test_a_row_that_failed_ends_a_round() -> None:
    """Its id, -1, is no guess, and is the round's last token."""
    found = accepted(torch.tensor([[5, 0, 0, 0]]), torch.tensor([[0, -1, 0, 0]]))
    assert found.lengths.tolist() == [2] and found.last.tolist() == [-1]


NEUTRAL = {"frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0, "min_new_tokens": 0}
ASKED = {"frequency_penalty": 0.5, "presence_penalty": 0.25, "repetition_penalty": 2.0, "min_new_tokens": 5}
PROMPT = 9


def request(answer: list[int], **asked: float) -> Any:
    """SGLang's, with three ids that end an answer."""
    return SimpleNamespace(
        sampling_params=SimpleNamespace(**NEUTRAL | asked, stop_token_ids=[5]),
        output_ids=answer,
        origin_input_ids=[0] * PROMPT,
        retraction_count=0,
        tokenizer=SimpleNamespace(additional_stop_token_ids={6}, eos_token_id=7),
        eos_token_ids=None,
    )


def penalised(row: Tensor, said: list[int]) -> list[float]:
    """Logits [8] of the token behind ``said``, with the penalties of :data:`ASKED`, by hand."""
    found = []
    for token in range(8):
        value = float(row[token])
        if token in said:
            value -= 0.5 * said.count(token) + 0.25
            value = value * 2 if value < 0 else value / 2
        found.append(-torch.inf if token >= 5 and len(said) < 5 else value)
    return found


def test_penalties_of_each_row() -> None:
    """By the answer so far and the guesses up to the row, round after round; other requests have none."""
    generator = torch.Generator().manual_seed(4)
    said, one, other = [1, 1, 2], request([1, 1, 2], **ASKED), request([4])
    for accepted, known in ((2, 0), (3, 2), (1, 1), (3, 0)):
        guesses = torch.tensor([[said[-1], *torch.randint(0, 5, (2,), generator=generator).tolist()], [4, 4, 4]])
        logits = torch.randn(2, 3, 8, generator=generator)
        given, cached = logits.clone(), len(said) - 1
        round_ = Penalties(guesses, torch.tensor([PROMPT + cached, PROMPT]), [one, other])
        round_.apply(logits)
        assert torch.equal(logits[1], given[1])
        for row in range(3):
            answer = said + guesses[0, 1 : row + 1].tolist()
            assert logits[0, row].tolist() == pytest.approx(penalised(given[0, row], answer), abs=1e-6), (answer, row)
        round_.remember(torch.tensor([accepted, 1], dtype=torch.int32))
        said += [*guesses[0, 1:accepted].tolist(), int(torch.randint(0, 5, (), generator=generator))]
        one.output_ids = said[: len(said) - known]  # results reach the host late


@pytest.mark.parametrize("known", [0, 1], ids=["late", "known"])
def test_penalties_after_a_retraction(known: int) -> None:
    """The answer is in the prompt's pass then, and the host may not know yet what that has given."""
    said, one = [1, 1, 2], request([1], **ASKED)
    first = Penalties(torch.tensor([[1, 3, 3]]), torch.tensor([PROMPT]), [one])
    first.apply(torch.zeros(1, 3, 8))
    first.remember(torch.tensor([3]))
    one.retraction_count, one.output_ids = 1, said[: 2 + known]
    logits = torch.randn(1, 3, 8, generator=torch.Generator().manual_seed(5))
    given = logits.clone()
    Penalties(torch.tensor([[2, 0, 4]]), torch.tensor([PROMPT + 2]), [one]).apply(logits)
    for row, answer in enumerate(([1, 1, 2], [1, 1, 2, 0], [1, 1, 2, 0, 4])):
        assert logits[0, row].tolist() == pytest.approx(penalised(given[0, row], answer), abs=1e-6)


@pytest.mark.parametrize("expected", [1.0, 2.5, 3.0])
def test_forced_acceptance(expected: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """So many rows in the mean, the same for all requests, whose tokens are the guesses and then what was sampled."""
    monkeypatch.setattr(accept, "simulated_length", lambda: expected)
    total = 0
    for seed in range(200):
        generator = torch.Generator().manual_seed(seed)
        guesses, sampled = (torch.randint(0, 9, (2, 3), generator=generator) for _ in range(2))
        before, guessed = sampled.clone(), guesses.clone()
        starts = torch.tensor([7, seed])
        found = accept.accept_round(guesses, sampled, starts)
        count = int(found.lengths[0])
        total += count
        assert found.lengths.tolist() == [count] * 2 and found.ends.tolist() == [7 + count, seed + count]
        assert found.last.tolist() == sampled[:, count - 1].tolist() and torch.equal(found.tokens, sampled)
        assert found.places.tolist() == [[3 * b + row if row < count else -1 for row in range(3)] for b in range(2)]
        assert torch.equal(sampled[:, : count - 1], guesses[:, 1:count])
        assert torch.equal(sampled[:, count - 1 :], before[:, count - 1 :])
        assert torch.equal(guesses, guessed)
    assert abs(total / 200 - expected) < 0.15


@pytest.mark.parametrize("simulated", [None, 3.0])
def test_rounds_of_dspark(simulated: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many rows as are right, or as are asked for; the tokens in front of the last are the guesses."""
    monkeypatch.setattr(accept, "simulated_length", lambda: simulated)
    guesses, answered = torch.tensor([[4, 1, 2, 3], [4, 0, 2, 3]]), torch.tensor([[1, 0, 3, 0], [1, 2, 3, 0]])
    monkeypatch.setattr(dspark_accept, "sample_rows", lambda logits, *given: answered.flatten().clone())
    remembered = list[Tensor]()
    executor = SimpleNamespace(nvfp4_sgl_penalties=SimpleNamespace(remember=remembered.append))
    found = dspark_accept.accept(
        print,
        executor,
        verify_ids_2d=guesses,
        target_logits=torch.zeros(8, VOCABULARY),
        sampling_info=SimpleNamespace(is_all_greedy=True),
        prefix_lens=torch.tensor([7, 9]),
    )
    lengths, tokens = ([3, 3], [[1, 2, 3, 0], [0, 2, 3, 0]]) if simulated else ([2, 1], answered.tolist())
    assert found.commit_lens.tolist() == remembered[0].tolist() == lengths
    assert found.out_tokens.tolist() == tokens and found.new_seq_lens.tolist() == [7 + lengths[0], 9 + lengths[1]]
    assert found.bonus.tolist() == [row[length - 1] for row, length in zip(tokens, lengths, strict=True)]


class Launches(TorchDispatchMode):
    """Notes operations that launch a kernel on a GPU: all but views and allocations."""

    def __init__(self) -> None:
        super().__init__()
        self.names = list[str]()

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_view = any(one.alias_info and not one.alias_info.is_write for one in operation._schema.returns)
        if not is_view and not operation._schema.name.startswith(("aten::empty", "aten::new_empty")):
            self.names.append(operation._schema.name)
        return operation(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("simulated", "more"),
    [
        pytest.param(None, [], id="real"),
        pytest.param(1.0, ["aten::clone", "aten::fill_"], id="simulated"),
        pytest.param(2.0, ["aten::copy_"], id="simulated, 2 rows"),
    ],
)
@pytest.mark.parametrize("blocks", [False, True], ids=["EAGLE", "DSPARK"])
@pytest.mark.parametrize("rows", [2, 4])
def test_a_gpu_accepts_in_one_launch(
    rows: int, blocks: bool, simulated: float | None, more: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside the sampling: greedy requests that ask for nothing else. docs/speculative_decoding.md says the same.

    Simulated acceptance has hardly more, so that a round that is timed so is a round.
    """
    monkeypatch.setattr(accept, "simulated_length", lambda: simulated)
    if simulated == 2 and rows > 2:
        more = [*more, "aten::clone", "aten::fill_"]
    tokens, info = torch.zeros(2 * rows, dtype=torch.int64), sampling_info(2)
    info.is_all_greedy, info.logit_bias = True, None
    monkeypatch.setattr(accept, "_sampler", lambda: SimpleNamespace(_sync_token_ids_across_tp=lambda *given: None))
    monkeypatch.setattr(finite_logits, "choose", lambda logits: (tokens, None))
    lengths, logits = torch.tensor([5, 6]), torch.zeros(2 * rows, VOCABULARY)
    batch = SimpleNamespace(
        forward_mode=SimpleNamespace(is_idle=lambda: False),
        sampling_info=info,
        seq_lens=lengths,
        reqs=[request([1])] * 2,
        return_logprob=False,
    )
    given = SimpleNamespace(draft_token_num=rows, draft_token=tokens, positions=tokens)
    output = SimpleNamespace(next_token_logits=logits)
    launched = mock.MagicMock()
    monkeypatch.setattr(kernel, "_accept_guesses", launched)

    def accept_round() -> Any:
        if blocks:
            return accepted_block(logits, tokens.view(2, rows), lengths, info)
        return accept.sample_round(print, given, batch, output)

    accept_round()  # imports, and holds what later rounds find
    with mock.patch.object(Tensor, "is_cuda", True), Launches() as found:
        accept_round()
    assert found.names == more
    assert launched.__getitem__.return_value.call_count == 1


def test_slots_around_a_round() -> None:
    """Tables of slots are read and written request after request."""
    table = torch.arange(4 * 10, dtype=torch.int32).view(4, 10)
    requests, lengths = torch.tensor([3, 1]), torch.tensor([2, 5])
    out = torch.empty(6, dtype=torch.int64)
    positions = torch.zeros(2, dtype=torch.int64)
    chain.draft_slots(print, requests, table, lengths, out, 1, 3, positions)
    assert out.tolist() == [32, 33, 34, 15, 16, 17] and torch.equal(positions, lengths)
    found = chain.cache_locs(
        req_pool_indices=requests,
        req_to_token=table,
        start_offset=lengths,
        end_offset=lengths + 3,
        batch_size=2,
        draft_token_num=3,
        device="cpu",
    )
    assert torch.equal(found, out)
    assert chain.last_slots(torch.add, table, requests, torch.tensor([0, 5])).tolist() == [-1, 14]
    chain.write_slots(print, requests, table, lengths, torch.tensor([4, 5]), torch.tensor([90, 91]), 2)
    assert table[3].tolist() == [30, 31, 90, 91, *range(34, 40)] and table[1].tolist() == [*range(10, 20)]
    bonus = torch.empty(2, dtype=torch.int32)
    chain.bonus_tokens(print, torch.tensor([[7, 8, 9], [4, 5, 6]]), torch.tensor([3, 1]), bonus, 3, 2)
    assert bonus.tolist() == [9, 4]


def test_a_tree_that_is_a_chain() -> None:
    positions, index = torch.empty(6).long(), torch.empty(2, 3).long()
    next_token, next_sibling, none = torch.empty(2, 3).long(), torch.empty(2, 3).long(), torch.empty(0)
    chain.build_tree(
        print, none, none, torch.tensor([5, 9]), none, positions, index, next_token, next_sibling, 1, 2, 3, None
    )
    assert positions.tolist() == [5, 6, 7, 9, 10, 11] and index.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert next_token.tolist() == [[1, 2, -1]] * 2 and next_sibling.eq(-1).all()
