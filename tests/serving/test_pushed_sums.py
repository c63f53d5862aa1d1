"""Sums over ranks that kernels push: when a server has them, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nvfp4_sgl import pushed_sums
from nvfp4_sgl.build import Serving, share_of
from nvfp4_sgl.checkpoint.drafts import DraftKind
from nvfp4_sgl.config import ModelConfig
from nvfp4_sgl.errors import ConfigError
from nvfp4_sgl.limits import PUSHING_RANKS
from nvfp4_sgl.memory.forecast import INBOXES, Forecast, forecast
from nvfp4_sgl.memory.plan import ServerFlags
from nvfp4_sgl.pushed_sums import SWITCH, capacity
from nvfp4_sgl.serving import loading, memory, model, runtime_info
from nvfp4_sgl.serving.sglang import parallel, settings
from nvfp4_sgl.synthetic.random_weights import verify_dummy
from nvfp4_sgl.synthetic.tiny_config import TinyFormat, tiny_config
from nvfp4_sgl.targets.choose import choose
from nvfp4_sgl.targets.fused import exchange as shared_memory
from nvfp4_sgl.targets.fused.exchange import exchange_of, lone_exchange
from nvfp4_sgl.tracing.asked import TRACE
from nvfp4_sgl.triton_kernels.common.inbox import empty_inbox
from nvfp4_sgl.weights.parallel import Collective, TensorParallel
from tests.support import released

SERVER: dict[str, Any] = {"target": "sm_90a", "ranks": 2, "custom_all_reduce": True, "traces": False}
"""A server that can push."""


@pytest.mark.parametrize(("given", "found"), [(None, None), ("", None), ("0", False), ("1", True)])
def test_the_switch(given: str | None, found: bool | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SWITCH, raising=False)
    if given is not None:
        monkeypatch.setenv(SWITCH, given)
    assert pushed_sums.asked() is found
    pushed_sums.check_asked(**SERVER)
    assert pushed_sums.planned(target="sm_90a", ranks=2) is (found is not False)


def test_another_value_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, "on")
    with pytest.raises(ConfigError, match=f"{SWITCH}: expected 0 or 1, found 'on'"):
        pushed_sums.check_asked(**SERVER)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"target": "sm_100a"}, "a server for sm_90a, found sm_100a"),
        ({"target": "cpu"}, "a server for sm_90a, found cpu"),
        ({"ranks": 1}, "--tp-size 2, 4 or 8, found 1"),
        ({"ranks": 16}, "--tp-size 2, 4 or 8, found 16"),
        ({"custom_all_reduce": False}, "reach each other's memory, found --disable-custom-all-reduce"),
        ({"traces": True}, "found NVFP4_SGL_TRACE"),
    ],
)
def test_what_stands_against_it(changed: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, "1")
    with pytest.raises(ConfigError, match=words):
        pushed_sums.check_asked(**{**SERVER, **changed})
    monkeypatch.setenv(SWITCH, "0")
    pushed_sums.check_asked(**{**SERVER, **changed})


@pytest.mark.parametrize(
    "changed", [{"target": "sm_100a"}, {"target": "cpu"}, {"ranks": 1}, {"ranks": 4}, {"ranks": 16}, {"traces": True}]
)
def test_what_is_not_done_without_being_asked(changed: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """More ranks than two have not run on GPUs; what cannot be done is left out, and refused if it is insisted on."""
    monkeypatch.delenv(SWITCH, raising=False)
    given: dict[str, Any] = {"target": "sm_90a", "ranks": 2, **changed}
    assert not pushed_sums.planned(**given)
    monkeypatch.setenv(SWITCH, "1")
    assert pushed_sums.planned(target="sm_90a", ranks=4)


def test_kernels_are_built_for_the_sums_of_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server, which knows its GPUs, says so; without one the environment does."""
    monkeypatch.delenv(SWITCH, raising=False)
    for setting, target, pushes in (
        (Serving(2, 512), "sm_90a", True),
        (Serving(2, 512, pushed_sums=False), "sm_90a", False),
        (Serving(4, 512), "sm_90a", False),
        (Serving(4, 512, pushed_sums=True), "sm_90a", True),
        (Serving(2, 512), "sm_100a", False),
    ):
        assert (share_of(setting, 4096, target).exchange is not None) is pushes, (setting, target)


def communicator(kind: str, **fields: Any) -> Any:
    """SGLang's all-reduce of a kind, as far as it is asked."""
    from sglang.srt.distributed.device_communicators.custom_all_reduce import CustomAllreduce
    from sglang.srt.distributed.device_communicators.custom_all_reduce_v2 import CustomAllReduceV2

    found: Any = object.__new__({"older": CustomAllreduce, "newer": CustomAllReduceV2}[kind])
    vars(found).update(fields)
    return found


def test_gpus_that_do_not_reach_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang finds out when its ranks meet, after the arguments are checked.

    Its older all-reduce waits for nobody in passes before a capture, so it is no barrier between two sums of a slot.
    """
    group, find = SimpleNamespace(ca_comm=None), parallel.find
    monkeypatch.setattr(parallel, "tp_size", lambda: 2)
    monkeypatch.setattr(parallel, "find", lambda name: (lambda: group) if name == "get_tp_group" else find(name))
    for found in (None, communicator("newer", disabled=True), communicator("older", disabled=False, _ptr=0)):
        group.ca_comm = found
        assert not parallel.reaches_peers()
        monkeypatch.setenv(SWITCH, "1")
        with pytest.raises(ConfigError, match=f"{SWITCH}=1: expected GPUs that reach each other's memory"):
            model.pushes_sums("sm_90a")
        monkeypatch.delenv(SWITCH)
        assert not model.pushes_sums("sm_90a")
    group.ca_comm = communicator("newer", disabled=False)
    assert parallel.reaches_peers() and model.pushes_sums("sm_90a")
    monkeypatch.setenv(SWITCH, "0")
    assert not model.pushes_sums("sm_90a")


def test_a_server_compiles_for_the_sums_that_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not for those that the environment would have: its GEMMs are another library."""
    monkeypatch.setattr(parallel, "tp_size", lambda: 2)
    monkeypatch.delenv(SWITCH, raising=False)
    for reaches in (True, False):
        monkeypatch.setattr(parallel, "reaches_peers", lambda reaches=reaches: reaches)
        tokens = model.pushed_tokens("sm_90a")
        assert tokens == (capacity(2) if reaches else 0)
        sizes: Any = SimpleNamespace(ranks=2, context=512, requests=4, chunk=64, round_tokens=3, pushed_tokens=tokens)
        found = model.compiled_for(sizes, choose("sm_90a"), True)
        assert found == Serving(2, 512, 4, 64, True, choose("sm_90a").mode, 3, reaches)


def test_a_server_forecasts_the_sums_that_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it compiles for comes from its forecast."""
    (tmp_path / "config.json").write_text(json.dumps(released.FLASH))
    verified, found = verify_dummy(tmp_path), list[Any]()
    values = {"max_running_requests": 4, "swa_full_tokens_ratio": 0.1, "mem_fraction_static": 0.8}
    asked: dict[str, Any] = {
        "served_arguments": None,
        "given_arguments": {"kv_cache_dtype": "auto"},
        "draft_algorithm": None,
        "largest_prefill": 8192,
        "sizes_window_by_ratio": True,
        "round_tokens": 0,
        "environment_flag": False,
    }
    for name, value in asked.items():
        monkeypatch.setattr(settings, name, lambda *_, value=value: value)
    monkeypatch.setattr(settings, "resolved", values.get)
    for place, name, value in (
        (loading.arguments, "served_here", verified),
        (loading.models, "activation_mode", None),
        (loading, "detect_target", "sm_90a"),
        (memory.kv_pool, "row_dtype", None),
        (memory, "captured_tokens", ()),
        (memory, "free_bytes", 139 << 30),
        (parallel, "tp_size", 2),
        (parallel, "tp_rank", 0),
    ):
        monkeypatch.setattr(place, name, lambda *_, value=value: value)

    def compiling(verified: Any, target: str, setting: Serving) -> None:
        found.append(setting)
        raise InterruptedError

    def recorded(*given: Any) -> Forecast:
        found.append(forecast(*given))
        return found[-1]

    monkeypatch.setattr(model, "start_compiling", compiling)
    monkeypatch.setattr(memory, "forecast", recorded)
    monkeypatch.delenv(SWITCH, raising=False)
    for reaches in (True, False):
        monkeypatch.setattr(parallel, "reaches_peers", lambda reaches=reaches: reaches)
        with pytest.raises(InterruptedError):
            model.DeepseekV4ForCausalLM(None)
        forecasted, compiled = found[-2:]
        assert compiled.pushed_sums is reaches is (INBOXES in forecasted.server)


def test_a_server_that_records_passes_pushes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sublayer's output, which is recorded, would not be there."""
    monkeypatch.setattr(parallel, "tp_size", lambda: 2)
    monkeypatch.setattr(parallel, "reaches_peers", lambda: True)
    monkeypatch.delenv(SWITCH, raising=False)
    monkeypatch.setenv(TRACE, "")
    assert model.pushes_sums("sm_90a")
    monkeypatch.setenv(TRACE, "records")
    assert not model.pushes_sums("sm_90a")


def test_no_rank_sends_before_every_inbox_is_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    own = torch.zeros(2, 2, 4, 8, dtype=torch.int16)

    def meet(group: Any) -> None:
        done.append("meet")
        assert bool((own == -1).all()), "an inbox that holds something is taken for a part"

    shared = SimpleNamespace(offset=0, get_buffer=lambda rank, shape, dtype: own)
    monkeypatch.setattr(shared_memory.symmetric, "empty", lambda *shape, **more: own)
    monkeypatch.setattr(shared_memory.symmetric, "rendezvous", lambda tensor, group: shared)
    monkeypatch.setattr(shared_memory.dist, "get_world_size", lambda group: 2)
    monkeypatch.setattr(shared_memory.dist, "get_rank", lambda group: 0)
    monkeypatch.setattr(shared_memory.dist, "barrier", meet)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: done.append("written"))
    group: Any = "group"
    shared_memory.shared_inboxes(group, 4, 8, torch.device("cpu"))
    assert done == ["written", "meet"]


@pytest.mark.parametrize("ranks", PUSHING_RANKS)
def test_inboxes_take_what_is_forecast(ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model has inboxes, and so has a draft beside it; without pushed sums there are none."""
    allocated: list[torch.Tensor] = []

    def empty(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        allocated.append(torch.empty(shape, dtype=dtype, device="meta"))
        return allocated[-1]

    shared = SimpleNamespace(offset=0, get_buffer=lambda rank, shape, dtype: allocated[-1])
    monkeypatch.setattr(shared_memory.symmetric, "empty", empty)
    monkeypatch.setattr(shared_memory.symmetric, "rendezvous", lambda tensor, group: shared)
    for name, value in {"get_world_size": ranks, "get_rank": 1, "barrier": None}.items():
        monkeypatch.setattr(shared_memory.dist, name, lambda group, value=value: value)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    for name, found in {"tp_rank": 1, "tp_size": ranks, "tp_cpu_group": "group", "reaches_peers": True}.items():
        monkeypatch.setattr(parallel, name, lambda found=found: found)
    monkeypatch.setenv(SWITCH, "1")
    (tmp_path / "config.json").write_text(json.dumps(released.FLASH))
    verified = verify_dummy(tmp_path)
    like = torch.empty(0, dtype=torch.bfloat16, device="meta")
    given: Any = (None, verified.config, choose("sm_90a"), like, False)
    model.rank_context(*given)
    (own,) = allocated
    setting = ServerFlags(ranks=ranks).setting("sm_90a", verified.config)
    assert setting.pushed_tokens == capacity(ranks)
    assert forecast(verified, "sm_90a", setting, None).server[INBOXES] == own.nbytes
    for more, models in ({"draft": DraftKind.MTP, "round_tokens": 3}, 2), ({"pushed_tokens": 0}, 0):
        changed = replace(setting, **more)
        assert forecast(verified, "sm_90a", changed, None).server.get(INBOXES, 0) == models * own.nbytes
    monkeypatch.setenv(SWITCH, "0")
    assert ServerFlags(ranks=ranks).setting("sm_90a", verified.config).pushed_tokens == 0


@pytest.mark.parametrize(
    ("changed", "value", "words"),
    [
        ({}, None, "pushed in passes of up to 32 tokens, else by SGLang's all-reduce: the default of 2 ranks"),
        ({}, "1", f"pushed in passes of up to 32 tokens, else by SGLang's all-reduce: {SWITCH}=1"),
        ({"ranks": 4}, "1", f"pushed in passes of up to 32 tokens, else by SGLang's all-reduce: {SWITCH}=1"),
        ({}, "0", f"by SGLang's all-reduce: {SWITCH}=0"),
        ({"ranks": 8}, None, f"by SGLang's all-reduce: the default of 8 ranks; {SWITCH}=1 has them push"),
        ({"ranks": 16}, None, "by SGLang's all-reduce: 2, 4 or 8 ranks can push, found 16"),
        ({"ranks": 1}, None, "none, with one rank"),
        ({"target": "sm_100a"}, None, "by SGLang's all-reduce: kernels of sm_90a alone push, found sm_100a"),
        ({"target": "cpu", "ranks": 4}, "0", "by SGLang's all-reduce: kernels of sm_90a alone push, found cpu"),
        ({"traces": True}, None, f"by SGLang's all-reduce: {TRACE} is set"),
    ],
)
def test_the_reason_is_said(
    changed: dict[str, Any], value: str | None, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(SWITCH, raising=False)
    if value is not None:
        monkeypatch.setenv(SWITCH, value)
    given: dict[str, Any] = {"target": "sm_90a", "ranks": 2, "traces": False} | changed
    said = pushed_sums.describe(**given)
    assert said.startswith(words)
    assert said.startswith("pushed") is pushed_sums.planned(**given)
    if not given["traces"]:
        tokens = pushed_sums.planned_tokens(target=given["target"], ranks=given["ranks"])
        assert tokens == (32 if said.startswith("pushed") else 0)


@pytest.mark.parametrize("target", ["cpu", "sm_100a"])
def test_targets_that_cannot_push_plan_no_tokens(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A forecast of their memory counts no inboxes, also where it is asked before the switch is refused."""
    monkeypatch.setenv(SWITCH, "1")
    assert pushed_sums.planned_tokens(target=target, ranks=2) == 0
    assert pushed_sums.planned_tokens(target="sm_90a", ranks=2) == 32


def test_a_rank_s_share_has_the_inboxes_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless it is switched off; sized by the model's width."""
    config = ModelConfig.from_dict(tiny_config(TinyFormat.NVFP4_FULL, {}))
    inboxes, asked = list[torch.Tensor](), list[tuple[Any, ...]]()

    def shared(*given: Any) -> list[torch.Tensor]:
        asked.append(given)
        inboxes.extend(empty_inbox(2, given[1], given[2], "cpu") for _ in range(2))
        return inboxes

    monkeypatch.setattr(model, "shared_inboxes", shared)
    for name, value in {"tp_rank": 1, "tp_size": 2, "tp_cpu_group": "group", "reaches_peers": True}.items():
        monkeypatch.setattr(parallel, name, lambda value=value: value)
    monkeypatch.setenv(SWITCH, "0")
    given: Any = (None, config, choose("sm_90a"), torch.empty(0, dtype=torch.bfloat16), False)
    assert model.rank_context(*given).parallel.exchange is None and not asked
    monkeypatch.delenv(SWITCH)
    exchange = model.rank_context(*given).parallel.exchange
    assert asked == [("group", capacity(2), config.hidden_size, torch.device("cpu"))]
    assert exchange is not None and exchange.tokens == capacity(2)
    assert exchange.slots[Collective.EXPERT_OUTPUT].parts.data_ptr() == inboxes[1][1].data_ptr()


def test_capacity() -> None:
    """A power of two, for which kernels are compiled."""
    tokens = {capacity(ranks) for ranks in PUSHING_RANKS}
    assert tokens == {32}
    assert capacity(3) == capacity(1) == 0
    assert lone_exchange(3, 4096, torch.device("meta")) is None


def test_every_part_has_a_place_in_every_rank_s_memory() -> None:
    """What rank r stores is part r of each rank's inbox, of the slot of the place; its own outbox is the first."""
    ranks, tokens, d = 4, 3, 8
    inboxes = [empty_inbox(ranks, tokens, d, "cpu") for _ in range(ranks)]
    exchanges = [exchange_of(rank, inboxes) for rank in range(ranks)]
    for place in Collective:
        for rank, exchange in enumerate(exchanges):
            slot = exchange.slots[place]
            assert slot.outboxes[0].data_ptr() == slot.parts[rank].data_ptr()
            for index, outbox in enumerate(slot.places(2)):
                outbox.fill_(1 + 10 * rank + index)
        for reader, exchange in enumerate(exchanges):
            parts = exchange.slots[place].parts.view(torch.bfloat16)
            for sender in range(ranks):
                others = [sender, *(rank for rank in range(ranks) if rank != sender)]
                assert bool((parts[sender, :2] == 1 + 10 * sender + others.index(reader)).all())
                assert bool((exchange.slots[place].parts[sender, 2:] == -1).all())
    slots = [exchanges[0].slots[place].parts.data_ptr() for place in Collective]
    assert len({*slots}) == len(slots)


def test_memory_that_cannot_be_shared_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container may forbid it, with words of the driver's alone."""

    def refused(*given: Any) -> list[torch.Tensor]:
        raise RuntimeError("CUDA driver error: operation not permitted")

    monkeypatch.setattr(model, "shared_inboxes", refused)
    for name, value in {"tp_rank": 1, "tp_size": 2, "tp_cpu_group": "group"}.items():
        monkeypatch.setattr(parallel, name, lambda value=value: value)
    with pytest.raises(ConfigError, match=f"cannot share it: CUDA driver error: .* not permitted; set {SWITCH}=0"):
        model.shared_exchange(32, 4096, torch.device("cpu"))


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_server_says_how_it_sums(ranks: int) -> None:
    def said(share: TensorParallel) -> str:
        layers = [SimpleNamespace(attn=SimpleNamespace(sends=n > 0), ffn=SimpleNamespace(sends=True)) for n in range(3)]
        served: Any = SimpleNamespace(context=SimpleNamespace(parallel=share), decoder=SimpleNamespace(layers=layers))
        return runtime_info.describe_sums(served)

    plain = said(TensorParallel(0, ranks))
    assert plain == ("none, with one rank" if ranks == 1 else "by SGLang's all-reduce")
    exchange = lone_exchange(ranks, 4096, torch.device("meta"))
    if ranks == 1:
        assert exchange is None
    else:
        words = "pushed by 5 of 6 sublayers in passes of up to 32 tokens, else by SGLang's all-reduce"
        assert said(TensorParallel(0, ranks, exchange=exchange)) == words
