"""Prompts of a server in CUDA graphs: when they are captured, and which passes they stand for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from torch import Tensor

from nvfp4_sgl import prompt_sizes
from nvfp4_sgl.config import ModelConfig
from nvfp4_sgl.errors import ConfigError, UnsupportedError
from nvfp4_sgl.model.contract import PassRequest
from nvfp4_sgl.model.static_prompt import PromptSize
from nvfp4_sgl.prompt_graphs import PromptGraphs
from nvfp4_sgl.serving import model, prompt_graphs, prompt_switch, runtime_info
from nvfp4_sgl.serving.backend import Nvfp4AttentionBackend, pass_request
from nvfp4_sgl.synthetic.tiny_config import TinyFormat, tiny_config
from tests.support import reruns

SWITCH = prompt_sizes.SWITCH
OBSTACLES = {
    "found none": ("torch.cuda.is_available", lambda: False),
    "--disable-cuda-graph": ("nvfp4_sgl.serving.sglang.settings.has_no_graphs", lambda: True),
    "--disable-prefill-cuda-graph": (
        "nvfp4_sgl.serving.sglang.settings.given_arguments",
        lambda arguments: {"disable_prefill_cuda_graph": True},
    ),
    "--chunked-prefill-size": ("nvfp4_sgl.serving.sglang.settings.largest_prefill", lambda: 255),
}


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A server that can capture prompts, of chunks of 1500 tokens."""
    settings = "nvfp4_sgl.serving.sglang.settings"
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr(f"{settings}.has_no_graphs", lambda: False)
    monkeypatch.setattr(f"{settings}.served_arguments", lambda: None)
    monkeypatch.setattr(f"{settings}.given_arguments", lambda arguments: {"disable_prefill_cuda_graph": False})
    monkeypatch.setattr(f"{settings}.largest_prefill", lambda: 1500)
    monkeypatch.delenv(SWITCH, raising=False)
    return monkeypatch


@pytest.mark.parametrize(("given", "found"), [(None, None), ("", None), ("0", False), ("1", True)])
def test_the_switch(given: str | None, found: bool | None, served: pytest.MonkeyPatch) -> None:
    if given is not None:
        served.setenv(SWITCH, given)
    assert prompt_sizes.asked() is found


def test_another_value_is_refused(served: pytest.MonkeyPatch) -> None:
    served.setenv(SWITCH, "yes")
    with pytest.raises(ConfigError, match=f"{SWITCH}: expected 0 or 1, found 'yes'"):
        prompt_switch.captured_tokens()


@pytest.mark.parametrize("value", ["", "0", "1"])
def test_prompts_asked_for_without_a_gpu_are_refused_before_the_start(
    value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SWITCH, value)
    prompt_sizes.check_asked(on_gpu=True)
    if value != "1":
        prompt_sizes.check_asked(on_gpu=False)
        return
    with pytest.raises(ConfigError, match=f"{SWITCH}=1: expected a GPU, found none; unset {SWITCH}"):
        prompt_sizes.check_asked(on_gpu=False)


@pytest.mark.parametrize("by_default", [False, True])
def test_no_graph_has_more_tokens_than_a_chunk(by_default: bool, served: pytest.MonkeyPatch) -> None:
    """Kernels are compiled before the start for passes up to a chunk."""
    served.setattr(prompt_switch, "BY_DEFAULT", by_default)
    assert prompt_switch.captured_tokens() == ((256, 512, 1024) if by_default else ())
    served.setenv(SWITCH, "1")
    assert prompt_switch.captured_tokens() == (256, 512, 1024)
    served.setenv(SWITCH, "0")
    assert prompt_switch.captured_tokens() == ()


@pytest.mark.parametrize(
    ("chunk", "tokens"),
    [(255, ()), (256, (256,)), (511, (256,)), (2048, (256, 512, 1024, 2048)), (8192, (256, 512, 1024, 2048))],
)
def test_a_chunk_may_fill_its_graph(chunk: int, tokens: tuple[int, ...], served: pytest.MonkeyPatch) -> None:
    served.setattr("nvfp4_sgl.serving.sglang.settings.largest_prefill", lambda: chunk)
    assert prompt_switch.captured_tokens() == tokens


@pytest.mark.parametrize("named", OBSTACLES)
def test_what_stands_against_them(named: str, served: pytest.MonkeyPatch) -> None:
    """By default there are none then; who asks for them is told."""
    served.setattr(prompt_switch, "BY_DEFAULT", True)
    assert prompt_switch.captured_tokens()
    served.setattr(*OBSTACLES[named])
    assert prompt_switch.captured_tokens() == ()
    served.setenv(SWITCH, "1")
    with pytest.raises(ConfigError, match=f"{SWITCH}=1: expected .*{named}.*; unset {SWITCH}"):
        prompt_switch.captured_tokens()
    served.setenv(SWITCH, "0")
    assert prompt_switch.captured_tokens() == ()


class Graphs:
    """Graphs that take passes of up to 4 tokens, and note them; the streams are those that a draft reads."""

    def __init__(self, streams: str | None = None) -> None:
        self.step, self.streams = "captured", streams
        self.loaded: list[PassRequest] = []
        self.ids: list[list[int]] = []

    def find(self, request: PassRequest) -> Any:
        return self if len(request.positions) <= 4 else None

    def load(self, request: PassRequest) -> None:
        self.loaded.append(request)

    def replay(self, ids: Tensor) -> tuple[Tensor, str | None]:
        self.ids.append(ids.tolist())
        return ids[:, None] * 10.0, self.streams


def backend_with(graphs: Graphs | None) -> Any:
    backend: Any = Nvfp4AttentionBackend.__new__(Nvfp4AttentionBackend)
    backend.planner = SimpleNamespace(plan=lambda request: "eager", capture=lambda request: "captured elsewhere")
    backend.prompts = graphs
    return backend


def batch(mode: ForwardMode, tokens: int) -> Any:
    """A request that adds so many tokens to the two that it has."""
    return SimpleNamespace(
        forward_mode=mode,
        positions=2 + torch.arange(tokens),
        req_pool_indices=torch.tensor([3]),
        seq_lens=torch.tensor([2 + tokens]),
        seq_lens_cpu=torch.tensor([2 + tokens]),
        extend_seq_lens=torch.tensor([tokens], dtype=torch.int32),
        spec_info=SimpleNamespace(draft_token_num=tokens, num_tokens_per_req=tokens),
    )


@pytest.mark.parametrize(
    ("mode", "tokens", "in_graph"),
    [
        (ForwardMode.EXTEND, 3, True),
        (ForwardMode.EXTEND, 1, True),
        (ForwardMode.EXTEND, 5, False),  # no graph holds it
        (ForwardMode.DECODE, 1, False),
        (ForwardMode.TARGET_VERIFY, 3, False),
        (ForwardMode.DRAFT_EXTEND_V2, 3, False),
    ],
    ids=str,
)
def test_which_passes_are_loaded_into_a_graph(mode: ForwardMode, tokens: int, in_graph: bool) -> None:
    graphs = Graphs()
    backend = backend_with(graphs)
    backend.init_forward_metadata(batch(mode, tokens))
    assert (backend.graph is graphs, backend.plan) == (in_graph, "captured" if in_graph else "eager")
    assert [request.requests.tolist() for request in graphs.loaded] == ([[3]] if in_graph else [])


def test_the_pass_behind_a_prompt_is_not_the_prompts() -> None:
    backend = backend_with(Graphs())
    for late, plan in (
        (lambda: backend.init_forward_metadata(batch(ForwardMode.DECODE, 1)), "eager"),
        (lambda: backend.init_forward_metadata(batch(ForwardMode.IDLE, 0)), None),
        (
            lambda: backend.init_forward_metadata_out_graph(batch(ForwardMode.DECODE, 1), in_capture=True),
            "captured elsewhere",
        ),
    ):
        backend.init_forward_metadata(batch(ForwardMode.EXTEND, 2))
        assert backend.graph is not None
        late()
        assert backend.graph is None and backend.plan == plan


def test_without_graphs_prompts_run_eagerly() -> None:
    backend = backend_with(None)
    backend.init_forward_metadata(batch(ForwardMode.EXTEND, 2))
    assert backend.graph is None and backend.plan == "eager"
    assert runtime_info.describe_prompts(backend) == {"tokens": [], "replays": 0}


@pytest.mark.parametrize("streams", [None, "streams"])
def test_a_graph_stands_for_the_body_of_the_model(streams: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits are those of its hidden states, and a draft gets its streams; ids of a request that has failed are
    replaced before."""
    backend = backend_with(Graphs(streams))
    forward_batch = batch(ForwardMode.EXTEND, 3)
    backend.init_forward_metadata(forward_batch)
    monkeypatch.setattr(model, "planned_backend", lambda: backend)
    own = SimpleNamespace(decoder="never called", head="head", logits_processor=lambda *given, **more: (given, more))
    ids = torch.tensor([7, -1, 9])
    given, more = model.DeepseekV4ForCausalLM.forward(own, ids, forward_batch.positions, forward_batch)  # type: ignore[arg-type]
    assert backend.graph.ids == [[7, 0, 9]] and given[1].flatten().tolist() == [70, 0, 90]
    assert given[2:] == ("head", forward_batch) and more == {"hidden_states_before_norm": streams}


def test_graphs_leave_streams_in_one_place() -> None:
    """As large as the largest graph's; of the tokens of the pass alone, as its hidden states are."""
    planner: Any = SimpleNamespace(capture=lambda request: None, fill=lambda step, request: None)
    among = [PromptSize(tokens, 2, 64) for tokens in (8, 4)]
    graphs = PromptGraphs(planner, lambda ids, step: (ids[:, None] * 2, ids[:, None] * 3), among, "cpu")
    with reruns.instead_of_graphs():
        graphs.capture()
    found = []
    for tokens in (7, 3):
        request = pass_request(batch(ForwardMode.EXTEND, tokens))
        graph = graphs.find(request)
        assert graph is not None
        graph.load(request)
        hidden, streams = graph.replay(5 + torch.arange(tokens))
        assert streams is not None and len(streams) == len(hidden) == tokens
        assert torch.equal(hidden[:, 0], 2 * (5 + torch.arange(tokens))) and torch.equal(streams * 2, hidden * 3)
        found.append(streams.data_ptr())
    assert found[0] == found[1]


class Made:
    """What stands for :class:`PromptGraphs`: notes what it is made of."""

    def __init__(self, planner: Any, body: Any, shapes: Any, device: str):
        self.body, self.shapes, self.order = body, shapes, planner.order

    def capture(self, stream: str) -> None:
        self.order.append(stream)


def runner_of(requests: int, served: pytest.MonkeyPatch, made: Any) -> Any:
    """SGLang's ``ModelRunner`` of a server that was asked for prompts in graphs, of sequences of up to 900 tokens."""
    order: list[str] = []

    @contextmanager
    def graph_capture() -> Iterator[str]:
        order.append("begin")
        yield "stream"
        order.append("end")

    served.setenv(SWITCH, "1")
    served.setattr("torch.cuda.mem_get_info", lambda: (0, 0))
    served.setattr("nvfp4_sgl.serving.sglang.parallel.tp_rank", lambda: 0)
    served.setattr(prompt_graphs, "PromptGraphs", made)
    served.setattr("nvfp4_sgl.serving.sglang.parallel.graph_capture", graph_capture)
    slots = SimpleNamespace(requests=requests, longest=900, table=torch.zeros(1, 904))
    config = ModelConfig.from_dict(tiny_config(TinyFormat.NVFP4_FULL, {}), source="test")
    return SimpleNamespace(
        attn_backend=SimpleNamespace(planner=SimpleNamespace(slots=slots, order=order), caches="caches", prompts=None),
        device="cuda",
        model=SimpleNamespace(model_config=config, body=lambda *given: given),
    )


@pytest.mark.parametrize(("requests", "rows"), [(1, 2), (64, 16)])
def test_what_is_captured(requests: int, rows: int, served: pytest.MonkeyPatch) -> None:
    """Shapes for this server, under SGLang's context of captures; the backend has the graphs afterwards."""
    runner = runner_of(requests, served, Made)
    prompt_graphs.capture(runner)
    prompts = runner.attn_backend.prompts
    assert prompts.order == ["begin", "stream", "end"]
    found = [(one.tokens, one.requests, one.longest) for one in prompts.shapes]
    assert found == [(tokens, rows, longest) for tokens in (512, 256) for longest in (900, 259)]
    assert prompts.body("ids", "step") == ("ids", "step", "caches")


def test_too_little_memory_is_said_with_the_flag(served: pytest.MonkeyPatch) -> None:
    class Large(Made):
        def capture(self, stream: str) -> None:
            raise torch.OutOfMemoryError("tried to allocate 3 GiB")

    runner = runner_of(4, served, Large)
    expected = (
        f"{SWITCH}: expected memory to capture prompts of up to 1024 tokens, .*3 GiB.*lower --mem-fraction-static"
    )
    with pytest.raises(UnsupportedError, match=expected):
        prompt_graphs.capture(runner)
    assert runner.attn_backend.prompts is None


def test_nothing_is_captured_unless_asked_for(served: pytest.MonkeyPatch) -> None:
    served.setenv(SWITCH, "0")
    prompt_graphs.capture(None)
