"""Before a replay, SGLang prepares nothing for backends whose graphs plan the pass. Imports SGLang."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.model_executor.runner import decode_cuda_graph_runner as runners

from nvfp4_sgl.serving import backend as backends
from nvfp4_sgl.serving import scheduler_start
from nvfp4_sgl.serving.backend import Nvfp4AttentionBackend, prepare_replay
from nvfp4_sgl.serving.drafts.backend import DraftBackend, DraftSteps
from nvfp4_sgl.serving.drafts.dspark_backend import DsparkBackend
from nvfp4_sgl.serving.sglang import ledger
from nvfp4_sgl.serving.sglang.ledger import find

OURS = (Nvfp4AttentionBackend, DraftBackend, DsparkBackend)
ARGUMENTS = {"raw_bs": 3, "bs": 4, "num_tokens": 4, "glue_key": None, "attention_variant": None}


class Runner(runners.DecodeCudaGraphRunner):
    """A runner with what the preparation reads, and an own ``view`` that is built for each replay."""

    def __init__(self, backend: Any, *, glue: Any = None, lora: Any = None) -> None:
        self.attn_backend, self.enable_pdmux = backend, False
        self._metadata_glue, self.model_runner = glue, SimpleNamespace(lora_manager=lora)
        self._early_verify_metadata = None
        self.buffers, self.seq_len_fill_value = object(), 1
        self.capture_forward_mode, self.is_encoder_decoder = object(), False

    def _global_num_tokens_for_graph(self, num_tokens: int) -> None:
        return None


@pytest.fixture
def views(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The views that SGLang builds."""
    built: list[Any] = []

    def build(**parts: Any) -> Any:
        built.append(SimpleNamespace(**parts))
        return built[-1]

    monkeypatch.setattr(runners, "build_replay_fb_view", build)
    return built


def prepare(runner: Runner) -> None:
    prepare_replay(runners.DecodeCudaGraphRunner._init_replay_attn_metadata_from_view, runner, object(), **ARGUMENTS)


@pytest.mark.parametrize("kind", OURS)
def test_no_view_is_built_for_our_backends(kind: Any, views: list[Any]) -> None:
    prepare(Runner(kind.__new__(kind)))
    assert not views


@pytest.mark.parametrize("kind", OURS)
def test_what_is_left_out_would_have_changed_nothing(kind: Any, views: list[Any]) -> None:
    """SGLang's own code, with one of our backends that has nothing to plan with."""
    backend, batch = kind.__new__(kind), SimpleNamespace()
    runner = Runner(backend)
    before = dict(vars(runner))
    runners.DecodeCudaGraphRunner._init_replay_attn_metadata_from_view(runner, batch, **ARGUMENTS)
    assert len(views) == 1 and vars(runner) == before and not vars(backend) and not vars(batch)
    assert views[0].forward_batch is batch


class Other(find("AttentionBackend")):  # type: ignore[misc]
    def __init__(self) -> None:
        self.prepared: list[Any] = []

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        self.prepared.append(forward_batch)


class Planning(Nvfp4AttentionBackend):
    """One of ours that would prepare something."""

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        pass


@pytest.mark.parametrize(
    "make",
    [
        lambda: Runner(Other()),
        lambda: Runner(Planning.__new__(Planning)),
        lambda: Runner(DraftSteps.__new__(DraftSteps)),
        lambda: Runner(
            Nvfp4AttentionBackend.__new__(Nvfp4AttentionBackend), glue=SimpleNamespace(note_not_routed=lambda: None)
        ),
        lambda: Runner(
            Nvfp4AttentionBackend.__new__(Nvfp4AttentionBackend), lora=SimpleNamespace(attn_dp_enabled=False)
        ),
    ],
    ids=["another", "one that plans", "steps of drafts", "metadata graph", "LoRA"],
)
def test_whoever_may_need_the_view_gets_it(make: Any, views: list[Any]) -> None:
    runner = make()
    prepare(runner)
    assert len(views) == 1
    if isinstance(runner.attn_backend, Other):
        assert runner.attn_backend.prepared == views


def test_the_hook_is_one_of_the_scheduler_of_our_model() -> None:
    """Names and parameters are those of the SGLang that is installed."""
    assert scheduler_start.backend.HOOKS is backends.HOOKS == {"prepare_replay": prepare_replay}
    private = ledger.HOOKS["prepare_replay"]
    hooked = runners.DecodeCudaGraphRunner._init_replay_attn_metadata_from_view
    assert private.path == f"{hooked.__module__}.{hooked.__qualname__}"
    assert private.parameters == ledger.parameters(hooked)
