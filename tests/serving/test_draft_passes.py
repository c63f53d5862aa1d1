"""What the passes of a round write and see, by what SGLang says of each."""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nvfp4_sgl.cache.layout import DRAFTED_TOKENS
from nvfp4_sgl.errors import UnsupportedError
from nvfp4_sgl.model.contract import PassKind, PassRequest
from nvfp4_sgl.serving.backend import Nvfp4AttentionBackend, pass_request
from nvfp4_sgl.serving.drafts import dspark_context
from nvfp4_sgl.serving.drafts.backend import DraftBackend, DraftSteps, create_decode_backend, create_extend_backend
from nvfp4_sgl.serving.drafts.dspark_backend import DsparkBackend
from nvfp4_sgl.serving.drafts.dspark_model import DsparkForCausalLM
from nvfp4_sgl.serving.drafts.model import MtpForCausalLM
from nvfp4_sgl.serving.sglang import parallel
from nvfp4_sgl.serving.sglang.ledger import find

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

    made = make_steps(3, SimpleNamespace(plan=plan))
    made.init_forward_metadata(batch("DECODE", positions=LENGTHS.clone()))
    assert plans(made) == [1, 2]
    assert [request.positions.tolist() for request in planned] == [[7, 130], [8, 131]]
    assert [request.ends.tolist() for request in planned] == [[8, 131], [9, 132]]


class Recorder:
    """A planner that notes what it is asked for, and fills steps by it."""

    def __init__(self) -> None:
        self.reserved, self.filled = 0, list[tuple[PassRequest, list[int], list[int]]]()

    def reserve(self, tokens: int) -> None:
        self.reserved = tokens

    def capture(self, request: PassRequest) -> PassRequest:
        return request

    def fill(self, step: PassRequest, request: PassRequest) -> None:
        assert request is step
        self.filled.append((request, request.positions.tolist(), request.ends.tolist()))


def test_captured_steps_keep_their_positions() -> None:
    """SGLang's positions count up as steps run, and every replay fills the tensors that the graph was captured with."""
    recorder = Recorder()
    steps = make_steps(3, recorder)
    steps.init_cuda_graph_state(2, 2)
    round_ = batch("DECODE", positions=LENGTHS.clone())
    steps.init_forward_metadata_out_graph(round_, in_capture=True)
    for length in (0, 5):
        round_.positions.copy_(LENGTHS + length)
        steps.init_forward_metadata_in_graph(round_)
        round_.positions.add_(2)
    steps.init_forward_metadata_out_graph(round_)  # a replay plans nothing anew
    filled = recorder.filled
    assert recorder.reserved == 2 and all(a is b for a, (b, *_) in zip(plans(steps) * 2, filled, strict=True))
    assert [positions for _, positions, _ in filled] == [[7, 130], [8, 131], [12, 135], [13, 136]]
    assert [ends for _, _, ends in filled] == [[8, 131], [9, 132], [13, 136], [14, 137]]
    assert len({request.positions.data_ptr() for request, *_ in filled} | {round_.positions.data_ptr()}) == 3


def test_a_captured_graph_keeps_what_it_reads() -> None:
    """A graph holds addresses alone; the next one's capture must not free them."""
    made: list[weakref.ref[torch.Tensor]] = []

    def capture(request: PassRequest) -> None:
        made.extend(map(weakref.ref, (request.positions, request.ends)))

    steps = make_steps(3, SimpleNamespace(capture=capture))
    for _ in range(2):
        steps.init_forward_metadata_out_graph(batch("DECODE", positions=LENGTHS.clone()), in_capture=True)
    assert len(made) == 8 and all(one() is not None for one in made)


def plans(steps: DraftSteps) -> list[Any]:
    return [one.plan for one in steps.attn_backends]


def make_steps(steps: int, planner: Any = None) -> DraftSteps:
    backend = DraftBackend.__new__(DraftBackend)
    backend.planner = planner
    runner = SimpleNamespace(attn_backend=backend)
    made = create_decode_backend(print, SimpleNamespace(speculative_num_steps=steps, draft_model_runner=runner))
    assert isinstance(made, DraftSteps)
    assert all(isinstance(one, Nvfp4AttentionBackend) and one is not backend for one in made.attn_backends)
    return made


def test_draft_extend_is_captured() -> None:
    """SGLang's worker captures it for the backends of a list; the runner's own stands for one of them."""
    backend = DraftBackend.__new__(DraftBackend)
    runner = SimpleNamespace(attn_backend=backend)
    assert create_extend_backend(print, SimpleNamespace(draft_model_runner=runner)) is backend
    assert isinstance(backend, find("TRTLLMMLABackend"))
    assert backend.get_cuda_graph_seq_len_fill_value() == DRAFTED_TOKENS


def test_a_single_step_needs_no_backend() -> None:
    assert create_decode_backend(print, SimpleNamespace(speculative_num_steps=1)) is None


def test_a_captured_block_follows_its_lengths() -> None:
    """A replay plans nothing anew: the graph fills the plan that it was captured with, by SGLang's buffers."""
    recorder = Recorder()
    backend = DsparkBackend.__new__(DsparkBackend)
    backend.planner = recorder
    backend.init_cuda_graph_state(2, 10)
    lengths, info = LENGTHS.clone(), SimpleNamespace(draft_token_num=5)
    positions = (lengths[:, None] + torch.arange(5)).flatten()
    block = batch("TARGET_VERIFY", seq_lens=lengths, positions=positions, spec_info=info)
    backend.init_forward_metadata_out_graph(block, in_capture=True)
    captured = backend.plan
    assert (captured.kind, captured.tokens_each, captured.added) == (PassKind.BLOCK, 5, None)

    filled: list[tuple[Any, list[int], bool]] = []
    backend.planner = SimpleNamespace(
        fill=lambda step, request: filled.append((step, request.ends.tolist(), request.positions is positions))
    )
    for accepted in (0, 3):
        lengths += accepted
        backend.init_forward_metadata_out_graph(block)
        backend.init_forward_metadata_in_graph(block)
    assert recorder.reserved == 10 and filled == [(captured, [12, 135], True), (captured, [15, 138], True)]


def test_padding_of_the_vocabulary_is_not_guessed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks hold the LM head in parts of equal size, and what is behind the vocabulary is no token."""
    seen = torch.arange(14.0).view(2, 7)
    monkeypatch.setattr(parallel, "tp_gather_columns", lambda logits: torch.cat([logits, 9 + logits[:, :1]], 1))
    model: Any = DsparkForCausalLM.__new__(DsparkForCausalLM)
    torch.nn.Module.__init__(model)
    guesses = SimpleNamespace(logits=lambda hidden, weight: seen)
    context = SimpleNamespace(parallel=SimpleNamespace(size=2), config=SimpleNamespace(vocab_size=6))
    model.draft = SimpleNamespace(guesses=guesses, context=context)
    model.vocabulary = (None, SimpleNamespace(weight=None))
    logits, _ = model.compute_base_logits(torch.zeros(2, 3))
    assert torch.equal(logits, seen[:, :6])


@pytest.mark.parametrize("kind", [MtpForCausalLM, DsparkForCausalLM])
def test_a_request_that_failed_is_embedded_as_a_token(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its last token is -1, for which there is no row of the embedding, nor experts of hash routing."""
    embedded, routed = list[list[int]](), list[list[int]]()
    step = SimpleNamespace(plan="plan", caches=["window"])
    monkeypatch.setattr(f"{kind.__module__}.planned_backend", lambda: step)
    model = kind.__new__(kind)
    torch.nn.Module.__init__(model)

    def embed(ids: torch.Tensor, *rest: Any) -> torch.Tensor:
        embedded.append(ids.tolist())
        return torch.zeros(len(ids), 4)

    def draft(*given: Any) -> Any:
        routed.append(given[-3].tolist())
        hidden = torch.zeros(2, 4)
        return (hidden, hidden[:, None]) if kind is MtpForCausalLM else hidden

    draft.context = SimpleNamespace(parallel=SimpleNamespace(size=1))  # type: ignore[attr-defined]
    model.draft, model.model_config = draft, SimpleNamespace(hc_mult=1)
    model.logits_processor, model.embedding = lambda *given, **rest: None, SimpleNamespace(embed=embed)
    embedding = embed if kind is MtpForCausalLM else SimpleNamespace(weight=None)
    model.vocabulary = (embedding, SimpleNamespace(weight=None))
    batch = SimpleNamespace(spec_info=SimpleNamespace(hidden_states=torch.zeros(2, 4)))
    model.forward(torch.tensor([5, -1]), torch.arange(2), batch)
    assert embedded == routed == [[5, 0]]


def test_windows_of_a_draft_in_other_slots_are_refused() -> None:
    """The target's plans would write into them at the wrong places."""
    fed: list[Any] = []

    def worker(own: torch.Tensor) -> Any:
        target = SimpleNamespace(
            token_to_kv_pool=SimpleNamespace(full_to_swa_index_mapping=SLOTS),
            model=SimpleNamespace(feed=lambda *given: fed.append(given)),
        )
        runner = SimpleNamespace(
            token_to_kv_pool=SimpleNamespace(full_to_swa_index_mapping=own),
            model=SimpleNamespace(draft="draft"),
            attn_backend=SimpleNamespace(caches="caches"),
        )
        return SimpleNamespace(target_worker=SimpleNamespace(model_runner=target), draft_model_runner=runner)

    with pytest.raises(UnsupportedError, match="^draft: expected its windows in the slots of the target's pool"):
        dspark_context.init_backends(lambda worker: None, worker(SLOTS.clone()))
    assert not fed
    dspark_context.init_backends(lambda worker: None, worker(SLOTS))
    assert fed == [("draft", "caches")]
