"""What the passes of a round write and see, by what SGLang says of each."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nvfp4_sgl.model.contract import PassRequest
from nvfp4_sgl.serving.backend import Nvfp4AttentionBackend, pass_request
from nvfp4_sgl.serving.drafts.backend import DraftBackend, DraftSteps, create_decode_backend

LENGTHS, SLOTS = torch.tensor([7, 130]), torch.tensor([3, 1])


def batch(mode: str, **fields: Any) -> Any:
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    given = {"seq_lens": LENGTHS, "req_pool_indices": SLOTS, "spec_info": None, **fields}
    return SimpleNamespace(forward_mode=ForwardMode[mode], **given)


PASSES: dict[str, tuple[dict[str, Any], list[int], int]] = {
    "DECODE": ({"positions": LENGTHS - 1}, [7, 130], 1),
    "TARGET_VERIFY": ({"spec_info": SimpleNamespace(draft_token_num=4)}, [11, 134], 4),
    "DRAFT_EXTEND_V2": ({"seq_lens": LENGTHS + 4, "spec_info": SimpleNamespace(num_tokens_per_req=4)}, [11, 134], 4),
}


@pytest.mark.parametrize("mode", PASSES)
def test_rows_of_a_pass(mode: str) -> None:
    """A verify pass comes with the lengths in front of it, the draft's pass over the same tokens with those behind."""
    fields, ends, each = PASSES[mode]
    request = pass_request(batch(mode, **{"positions": torch.empty(0)} | fields))
    assert request.ends.tolist() == ends and request.tokens_each == each and request.kind.is_by_size
    assert request.requests is SLOTS


def test_steps_see_what_was_drafted_before() -> None:
    planned: list[PassRequest] = []

    def plan(request: PassRequest) -> int:
        planned.append(request)
        return len(planned)

    backend = DraftBackend.__new__(DraftBackend)
    backend.planner = SimpleNamespace(plan=plan)
    runner = SimpleNamespace(attn_backend=backend)
    made = create_decode_backend(print, SimpleNamespace(speculative_num_steps=3, draft_model_runner=runner))
    assert isinstance(made, DraftSteps)
    made.init_forward_metadata(batch("DECODE", positions=LENGTHS.clone()))
    assert [one.plan for one in made.attn_backends] == [1, 2]
    assert all(isinstance(one, Nvfp4AttentionBackend) and one is not backend for one in made.attn_backends)
    assert [request.positions.tolist() for request in planned] == [[7, 130], [8, 131]]
    assert [request.ends.tolist() for request in planned] == [[8, 131], [9, 132]]


def test_a_single_step_needs_no_backend() -> None:
    assert create_decode_backend(print, SimpleNamespace(speculative_num_steps=1)) is None
