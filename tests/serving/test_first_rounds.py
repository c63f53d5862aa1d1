"""Rounds of drafts compile nothing that the warm-up has not: kernels around the graphs, ours and SGLang's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import triton
from torch import Tensor

from nvfp4_sgl.serving import first_requests
from nvfp4_sgl.serving.drafts import first_rounds
from nvfp4_sgl.serving.drafts.dspark_checks import INPUTS_ONCE
from nvfp4_sgl.serving.sglang import rounds, settings
from nvfp4_sgl.triton_kernels import ahead
from nvfp4_sgl.triton_kernels.logits.accept import accept_guesses
from nvfp4_sgl.triton_kernels.plan.relay import Left, keep_rows

ROWS, MOST, HIDDEN = 4, 40, 256
TABLE = torch.zeros(MOST, 1024, dtype=torch.int32)
MASK = torch.zeros(MOST * ROWS * ROWS, dtype=torch.bool)
Kernels = set[tuple[str, str]]


@contextmanager
def compiling() -> Iterator[Kernels]:
    """Kernels that launches would compile for an H200, with what for; none is launched."""
    noted: Kernels = set()

    def note(**launch: Any) -> bool:
        noted.add((launch["fn"].name, launch["compile"]["specialization_data"]))
        return True

    with ahead.targeting(90, 132), mock.patch.object(triton.knobs.runtime, "jit_cache_hook", note):
        yield noted


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang chooses its Triton kernels."""
    from sglang.kernels.ops.speculative import cache_locs
    from sglang.srt.mem_cache import allocation

    monkeypatch.setattr(cache_locs, "_is_cuda", True)
    monkeypatch.setattr(allocation, "attention_backends", lambda: ("nvfp4_sgl", "nvfp4_sgl"))
    monkeypatch.setattr(allocation, "ALLOC_EXTEND_FUNCS", {"cpu": lambda *_, **__: torch.zeros(512 * MOST).long()})


def allocated(requests: int) -> None:
    """SGLang gives slots to so many requests, as before a round."""
    from sglang.srt.mem_cache.allocation import alloc_for_spec_decode

    none, page = (torch.full((requests,), value, dtype=torch.int32) for value in (0, 256))
    alloc_for_spec_decode(
        SimpleNamespace(token_to_kv_pool_allocator=SimpleNamespace(page_size=256)),
        SimpleNamespace(req_to_token=TABLE),
        reqs=[SimpleNamespace(kv=SimpleNamespace(kv_allocated_len=0)) for _ in range(requests)],
        req_pool_indices=torch.arange(requests),
        cur_kv_lens=none,
        cur_kv_lens_cpu=none,
        nxt_kv_lens=page,
        nxt_kv_lens_cpu=page,
        num_needed_tokens=256 * requests,
        batch=SimpleNamespace(device="cpu", hisparse_coordinator=None),
    )


def round_of_blocks(requests: int) -> None:
    from sglang.srt.mem_cache.kv_index_translator import KVIndexTranslator

    owners, lengths, tokens = torch.arange(requests), torch.full((requests,), 9), torch.zeros(requests, ROWS).long()
    once = settings.environment_flag(INPUTS_ONCE)
    given = {
        "positions_out": torch.empty(requests, ROWS).long(),
        "anchor_src": tokens[:, 0].contiguous(),
        "anchor_out": torch.empty(MOST, ROWS - 1).long()[:requests],
    }
    translator = SimpleNamespace(reads_are_translated=False, req_to_token=TABLE, page_size=256, plan=lambda **_: None)
    KVIndexTranslator.plan_uniform_extend(
        translator,
        req_pool_indices=owners,
        seq_lens=lengths,
        seq_lens_cpu=None,
        width=ROWS,
        **(given if once else {}),
    )
    accept_guesses(tokens, tokens, lengths)


def round_of_chains(requests: int) -> None:
    from sglang.kernels.ops.speculative import cache_locs, eagle
    from sglang.kernels.ops.speculative.gather_spec_extras import gather_spec_extras

    owners, lengths = torch.arange(requests), torch.full((requests,), 9)
    _, guess, decided, _ = gather_spec_extras(
        owners,
        torch.zeros(MOST, 1),
        torch.zeros(MOST, 1).long(),
        torch.zeros(MOST).long(),
        torch.zeros(MOST, HIDDEN, dtype=torch.bfloat16),
    )
    guesses, out = guess.expand(-1, ROWS - 1).contiguous(), torch.empty(requests * ROWS).long()
    cache_locs.assign_draft_cache_locs_contiguous_func(
        owners, TABLE, lengths, out, 1, ROWS, positions=torch.empty_like(lengths), mrope=None
    )
    for token in (decided, decided.int()):
        chain = eagle.build_chain_tree(token, guesses, lengths, MASK, req_pool_indices=owners, req_to_token=TABLE)
    tokens = chain[5].view(requests, ROWS)
    accepted, _, places, answers, *_ = accept_guesses(tokens, tokens, lengths)
    rows = torch.zeros(MOST, HIDDEN, dtype=torch.bfloat16)
    kept = Left(torch.zeros(MOST).long(), torch.zeros(MOST, 1).long(), torch.zeros(MOST, 1), rows)
    for token in (decided, decided.int()):
        keep_rows(owners, Left(token, guess, torch.ones(requests, 1), rows[:requests].clone()), kept)
    eagle.prepare_verify_commit_outputs(answers.flatten(), places, accepted, lengths, num_draft_tokens=ROWS)
    eagle.prepare_draft_extend_layout(lengths, ROWS, False)


KINDS: dict[str, tuple[Callable[[], None], Callable[[int], None]]] = {
    "allocation": (lambda: first_rounds.give_slots(TABLE[:1], MOST), allocated),
    "DSPARK": (lambda: first_rounds.verify_block(TABLE[:1], ROWS), round_of_blocks),
    "EAGLE": (lambda: first_rounds.verify_chain(TABLE[:1], ROWS, MASK, HIDDEN), round_of_chains),
}
"""What the warm-up runs, and what SGLang does with so many requests."""


def lacking(kind: str, *requests: int) -> set[str]:
    """Kernels that rounds of so many requests compile, and the warm-up does not."""
    warm_up, run = KINDS[kind]
    with compiling() as warm:
        warm_up()
    with compiling() as needed:
        for count in requests:
            run(count)
    assert needed
    return {name for name, _ in needed - warm}


@pytest.mark.parametrize("once", ["0", "1"])
def test_blocks_with_and_without_slots_in_one_launch(once: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(INPUTS_ONCE, once)
    assert not lacking("DSPARK", 1, 2, 17)


@pytest.mark.parametrize("kind", KINDS)
def test_rounds_compile_nothing(kind: str) -> None:
    assert not lacking(kind, 1, 2, 3, 5, 16, 17, 32, MOST)


@pytest.mark.parametrize(
    ("kind", "left_out", "kernel"),
    [
        ("allocation", "find_slots", "get_last_loc_kernel"),
        ("allocation", "write_slots", "assign_req_to_token_pool"),
        ("DSPARK", "read_block_slots", "assign_extend_cache_locs_uniform"),
        ("EAGLE", "read_step_slots", "assign_draft_cache_locs_contiguous"),
        ("EAGLE", "build_chain", "_build_chain_tree_kernel"),
        ("EAGLE", "commit", "_verify_commit_outputs_kernel"),
        ("EAGLE", "lay_out", "_prepare_draft_extend_lengths_kernel"),
        ("EAGLE", "gather", "_gather_rows_kernel"),
    ],
)
def test_a_kernel_that_is_left_out_is_seen(
    kind: str, left_out: str, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rounds, left_out, lambda *_, **__: None)
    assert lacking(kind, 3) == {kernel}


def test_allocation_of_more_requests_is_compiled_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once for each power of two: of one request alone it is not enough."""
    monkeypatch.setattr(first_requests, "sizes", lambda most: iter((1,)))
    monkeypatch.setattr(first_requests, "ROWS", (1,))
    assert lacking("allocation", 3) == {"assign_req_to_token_pool", "get_last_loc_kernel"}


@pytest.mark.parametrize("blocks", [False, True], ids=["EAGLE", "DSPARK"])
def test_a_start_runs_all(blocks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the scheduler's table, mask and bounds; pages go back."""
    ran = dict[str, Any]()
    for name in ("give_slots", "verify_block", "verify_chain"):
        monkeypatch.setattr(first_rounds, name, lambda *given, name=name: ran.__setitem__(name, given))
    monkeypatch.setattr(first_rounds.settings, "drafts_blocks", lambda: blocks)
    monkeypatch.setattr(first_rounds.settings, "round_tokens", lambda: ROWS)
    extended = list[Tensor]()

    def extend(none: Tensor, *rest: Any) -> Tensor:
        extended.append(none)
        return torch.arange(len(none))

    config = SimpleNamespace(hc_mult=4, hidden_size=HIDDEN // 4)
    runner = SimpleNamespace(
        model=SimpleNamespace(model_config=config),
        attn_backend=SimpleNamespace(verify_mask=SimpleNamespace(buffer=MASK)),
    )
    first_rounds.warm_up(
        SimpleNamespace(
            device="cuda:0",
            max_running_requests=MOST,
            req_to_token_pool=SimpleNamespace(req_to_token=TABLE),
            token_to_kv_pool_allocator=SimpleNamespace(
                alloc_extend=extend, free=lambda slots: None, clear=lambda: None
            ),
            tp_worker=SimpleNamespace(model_runner=runner),
        )
    )
    table, most = ran.pop("give_slots")
    assert most == MOST and table.stride() == TABLE.stride() and table.dtype == TABLE.dtype
    assert [len(each) for each in extended] == [1, 2, 4, 8, 16, 32, 40]
    assert all(each.dtype == torch.int32 for each in extended)
    if blocks:
        assert ran == {"verify_block": (table, ROWS)}
    else:
        assert ran == {"verify_chain": (table, ROWS, MASK, HIDDEN)}
