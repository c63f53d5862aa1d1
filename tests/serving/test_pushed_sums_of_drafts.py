"""Sums over ranks of a draft's passes: pushed where the target's are, through inboxes of the draft's own."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from nvfp4_sgl.checkpoint.verified import Verified, verify
from nvfp4_sgl.pushed_sums import SWITCH, capacity
from nvfp4_sgl.serving import loading, model
from nvfp4_sgl.serving.drafts import model as mtp_model
from nvfp4_sgl.serving.drafts.dspark_model import DsparkForCausalLM
from nvfp4_sgl.serving.drafts.loaded import LoadedDraft
from nvfp4_sgl.serving.sglang import parallel, settings
from nvfp4_sgl.synthetic.tiny import write_tiny
from nvfp4_sgl.targets.choose import choose
from nvfp4_sgl.triton_kernels.common.inbox import empty_inbox
from nvfp4_sgl.weights.parallel import Collective, TensorParallel

RANKS, RANK = 2, 1
DRAFTS: dict[str, type[LoadedDraft]] = {"mtp": mtp_model.MtpForCausalLM, "dspark": DsparkForCausalLM}


class Served:
    """A rank of a server of ``verified`` on Hopper, as far as its exchanges go.

    Attributes:
        inboxes: of each exchange in the order in which they were made, those of all ranks.
    """

    def __init__(self, verified: Verified, monkeypatch: pytest.MonkeyPatch) -> None:
        self.verified, self.inboxes = verified, list[list[Tensor]]()
        stands: dict[Any, dict[str, Any]] = {
            loading.arguments: {"served_here": verified},
            loading.models: {"activation_mode": None},
            loading: {"detect_target": "sm_90a"},
            settings: {"environment_flag": False, "draft_block": 5},
            mtp_model: {"make_logits_processor": None},
            parallel: {"tp_size": RANKS, "tp_rank": RANK, "tp_cpu_group": "group", "reaches_peers": True},
        }
        for place, values in stands.items():
            for name, value in values.items():
                monkeypatch.setattr(place, name, lambda *_, value=value: value)
        monkeypatch.setattr(model, "shared_inboxes", self._shared)

    def _shared(self, group: Any, tokens: int, width: int, device: torch.device) -> list[Tensor]:
        self.inboxes.append([empty_inbox(RANKS, tokens, width, "cpu") for _ in range(RANKS)])
        return self.inboxes[-1]

    def target(self) -> TensorParallel:
        """The share of the target."""
        like, reader = torch.empty(0, dtype=torch.bfloat16), self.verified.reader()
        return model.rank_context(reader, self.verified.config, choose("sm_90a"), like, False).parallel

    def draft(self, kind: str) -> Any:
        """The draft, loaded."""
        made = DRAFTS[kind](SimpleNamespace())
        made._like = torch.empty(0, dtype=torch.bfloat16)
        made.load_weights([])
        return made.draft


@pytest.fixture(params=DRAFTS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def served(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Served:
    write_tiny(tmp_path / "tiny", "nvfp4-experts", seed=3, num_hidden_layers=3, draft=kind)
    monkeypatch.delenv(SWITCH, raising=False)
    return Served(verify(tmp_path / "tiny"), monkeypatch)


def memory_of(tensor: Tensor) -> int:
    """The allocation that ``tensor`` is in."""
    return tensor.untyped_storage().data_ptr()


def test_a_draft_sends_to_inboxes_of_its_own(kind: str, served: Served) -> None:
    """Each model by itself then keeps the rule of slots, of which one is used again after the other."""
    target, draft = served.target(), served.draft(kind)
    assert len(served.inboxes) == 2 and target.exchange is not None
    of_target, of_draft = ([memory_of(inbox) for inbox in inboxes] for inboxes in served.inboxes)
    share = draft.context.parallel
    assert (share.rank, share.size) == (RANK, RANKS) and share.exchange.tokens == capacity(RANKS)
    blocks = [draft.block] if kind == "mtp" else [*draft.stages]
    for sublayer in [one for block in blocks for one in block.sublayers(None, None, None)]:
        slot = draft.context.tokens(capacity(RANKS)).slot(sublayer.collective)
        assert slot is not None and memory_of(slot.parts) == of_draft[RANK]
        assert [memory_of(place) for place in slot.places(3)] == [of_draft[RANK], of_draft[1 - RANK]]
    assert any(block.ffn.sends for block in blocks)
    assert draft.context.tokens(capacity(RANKS) + 1).slot(Collective.EXPERT_OUTPUT) is None
    slots = target.exchange.slots.values()
    assert {memory_of(outbox) for slot in slots for outbox in slot.outboxes} == {*of_target}
    assert not {*of_target} & {*of_draft}


def test_a_draft_pushes_nothing_where_its_target_does_not(
    kind: str, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SWITCH, "0")
    target, draft = served.target(), served.draft(kind)
    assert target.exchange is None and draft.context.parallel.exchange is None and not served.inboxes
