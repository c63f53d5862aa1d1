"""What SGLang keeps of a round for the next one: by its own code, or by one launch on a GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from nvfp4_sgl.errors import OperandTypeError
from nvfp4_sgl.serving.drafts import relay
from nvfp4_sgl.triton_kernels.plan.relay import Left

SLOTS = torch.tensor([3, 1])


@pytest.fixture
def future(monkeypatch: pytest.MonkeyPatch) -> Any:
    """SGLang's, of a server with EAGLE."""
    from sglang.srt.managers import overlap_utils
    from sglang.srt.speculative import spec_utils
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    monkeypatch.setattr(spec_utils, "spec_need_hidden_states", lambda: True)
    pool = SimpleNamespace(req_to_token=torch.zeros(5, 8, dtype=torch.int32))
    return overlap_utils.FutureMap(torch.device("cpu"), SpeculativeAlgorithm.EAGLE, pool)


def payload(seed: int, **more: Tensor) -> Any:
    """Behind a round of two requests; the second one's logits are not finite."""
    from sglang.srt.managers.overlap_utils import RelayPayload

    generator = torch.Generator().manual_seed(seed)
    return RelayPayload(
        bonus_tokens=torch.tensor([seed, -1], dtype=torch.int32),
        topk_p=torch.ones(2, 1),
        topk_index=torch.randint(100, (2, 1), generator=generator),
        hidden_states=torch.randn(2, 16, generator=generator).bfloat16(),
        **more,
    )


def keep(future: Any, given: Any) -> bool:
    """Keep ``given`` as on a GPU; whether it was one launch."""

    def keep_rows(slots: Tensor, left: Left, kept: Left) -> None:
        for to, row in zip(kept, left, strict=True):
            to[slots] = row.to(to.dtype)

    launches = mock.patch.object(relay, "keep_rows", side_effect=keep_rows)
    with launches as launched, mock.patch.object(Tensor, "is_cuda", True):
        relay.keep_round(type(future).stash, future, SLOTS, given)
    return bool(launched.called)


def held(future: Any) -> list[Tensor]:
    found = (future.output_tokens_buf, future.topk_p_buf, future.topk_index_buf, future.hidden_states_buf)
    return [each[SLOTS] for each in found]


def test_one_launch_keeps_what_sglang_does(future: Any) -> None:
    """From the second round on: SGLang allocates by the first one, which is that of a prompt."""
    assert not keep(future, payload(1))
    assert keep(future, payload(2))
    ours = held(future)
    type(future).stash(future, SLOTS, payload(2))
    assert all(map(torch.equal, ours, held(future))) and ours[0].tolist() == [2, -1]


@pytest.mark.parametrize("more", ["draft_probs", "dsa_topk_indices"])
def test_what_else_a_round_may_leave_is_sglangs(more: str, future: Any) -> None:
    keep(future, payload(1))
    assert not keep(future, payload(2, **{more: torch.zeros(2, 4)}))
    assert torch.equal(held(future)[3], payload(2).hidden_states)


def test_other_dtypes_are_refused(future: Any) -> None:
    keep(future, payload(1))
    given = payload(2)
    given.topk_p = given.topk_p.double()
    with mock.patch.object(Tensor, "is_cuda", True), pytest.raises(OperandTypeError, match="probability, given"):
        relay.keep_round(type(future).stash, future, SLOTS, given)


def test_a_token_alone_is_sglangs(future: Any) -> None:
    """As of a prompt's chunk; the guess that is kept stays."""
    keep(future, payload(1))
    before = held(future)
    assert not keep(future, type(payload(1))(bonus_tokens=torch.tensor([7, 8])))
    assert held(future)[0].tolist() == [7, 8] and all(map(torch.equal, before[1:], held(future)[1:]))
