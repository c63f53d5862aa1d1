"""What a request may ask for, as pure functions: no server, nothing of SGLang's."""

from __future__ import annotations

import socket
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import xgrammar

from examples.function_calling import WEATHER
from nvfp4_sgl.errors import ConfigError
from nvfp4_sgl.limits import MAX_TEMPERATURE, MIN_REPETITION_PENALTY
from nvfp4_sgl.serving import arguments, grammars, requests
from nvfp4_sgl.serving.finite_logits import FAILED
from nvfp4_sgl.serving.sglang import parallel, request_state, settings

CALL = """

<｜DSML｜tool_calls>
<｜DSML｜invoke name="get_weather">
INDENT<｜DSML｜parameter name="city" string="true">Rome</｜DSML｜parameter>
</｜DSML｜invoke>
</｜DSML｜tool_calls>"""


@pytest.fixture(autouse=True)
def our_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank that serves our model."""
    for module in (requests, grammars):
        monkeypatch.setattr(module, "serves_our_model", lambda: True)
    monkeypatch.setattr(parallel, "tp_size", lambda: 1)


@pytest.fixture
def aborted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Messages of the requests that were failed."""
    messages: list[str] = []
    monkeypatch.setattr(request_state, "abort", lambda request, message: messages.append(message))
    return messages


# --- grammars ---------------------------------------------------------------------------------------------------


def test_mask_that_allows_nothing(aborted: list[str]) -> None:
    """Sampling stays valid, the neighbours' rows stay as they are, and the request is failed at its next token."""
    grammar, mask = SimpleNamespace(finished=False), torch.full((3, 16), 5, dtype=torch.int32)
    grammars.fill_mask(lambda grammar, mask, row: mask[row].zero_(), grammar, mask, 1)
    assert mask[1].eq(-1).all() and mask[[0, 2]].eq(5).all()
    request = SimpleNamespace(grammar=grammar, finished=lambda: True)
    assert grammars.accept_tokens(lambda *_: [7], None, request, 7) == []
    grammars.accept_prefill(lambda *_, **__: pytest.fail("accepted"), None, req=request, next_token_id=7)
    assert aborted == [grammars.NO_TOKEN] * 2 and grammar.finished


@pytest.mark.parametrize(("refused", "kept"), [(None, [7, 8, -1]), (8, [7])], ids=["taken", "ended"])
def test_a_token_that_is_none(refused: int | None, kept: list[int]) -> None:
    """A round's tokens come to the grammar before they are checked: it sees none behind one that is none."""

    def original(processor: Any, request: Any, tokens: list[int]) -> list[int]:
        assert FAILED not in tokens
        return tokens[: tokens.index(refused)] if refused in tokens else tokens

    request = SimpleNamespace(grammar=SimpleNamespace())
    assert grammars.accept_tokens(original, None, request, [7, 8, FAILED, 9]) == kept
    assert grammars.accept_tokens(original, None, request, FAILED) == [FAILED]


def test_mask_that_allows_something(aborted: list[str]) -> None:
    grammar, mask = SimpleNamespace(), torch.full((2, 16), -1, dtype=torch.int32)

    def only_one(grammar: Any, mask: torch.Tensor, row: int) -> None:
        mask[row] = 0
        mask[row, 15] = 1 << 30

    grammars.fill_mask(only_one, grammar, mask, 0)
    assert mask[0].tolist() == [0] * 15 + [1 << 30]
    assert grammars.accept_tokens(lambda *_: [7], None, SimpleNamespace(grammar=grammar), 7) == [7]
    calls: list[Any] = []
    request = SimpleNamespace(grammar=grammar)
    grammars.accept_prefill(lambda *args, **given: calls.append(given), None, req=request, next_token_id=7)
    assert calls == [{"req": request, "next_token_id": 7}] and not aborted


@pytest.mark.parametrize(("ranks", "working", "failed"), [(1, True, True), (1, False, False), (2, True, False)])
def test_mask_that_takes_long(ranks: int, working: bool, failed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several ranks must not go by their own clocks, and a thread that waits is not working."""

    def fill(*_: Any) -> None:
        end = time.thread_time() + 0.02
        while working and time.thread_time() < end:
            pass
        time.sleep(0 if working else 0.02)

    monkeypatch.setattr(parallel, "tp_size", lambda: ranks)
    monkeypatch.setattr(grammars, "MAX_MASK_SECONDS", 0.01)
    grammar = SimpleNamespace()
    grammars.fill_mask(fill, grammar, torch.full((1, 16), -1, dtype=torch.int32), 0)
    wrapped = SimpleNamespace(grammar=grammar)  # as after a reasoning part
    assert (grammars.fault(wrapped) is not None) == (grammars.fault(grammar) is not None) == failed


def test_cached_grammars_are_bounded() -> None:
    """Also those of the compiler that a backend for reasoning models wraps."""

    class Backend:
        def __init__(self, inner: Any = None) -> None:
            self.cache: dict[Any, Any] = {}
            self.resets, self.grammar_backend = 0, inner

        def reset(self) -> None:
            self.cache.clear()
            self.resets += 1

    def compiled(size: int) -> Any:
        return SimpleNamespace(ctx=SimpleNamespace(memory_size_bytes=size))

    def keep(key: Any, value: Any) -> None:
        grammars.cache(lambda backend, key, value: backend.cache.update({key: value}), outer, key, value)

    inner = Backend()
    outer = Backend(inner)
    for key in range(300):
        keep(key, SimpleNamespace(grammar=compiled(1)))  # as after a reasoning part
        assert len(outer.cache) <= grammars.MAX_CACHED_GRAMMARS and key in outer.cache
    assert outer.resets == inner.resets == 2
    keep("large", compiled(grammars.MAX_CACHED_BYTES))
    assert list(outer.cache) == ["large"]
    keep("refused", SimpleNamespace(error_message="takes too long"))
    assert list(outer.cache) == ["large"], "it may be compiled when the server is less busy"


# --- requests ---------------------------------------------------------------------------------------------------


def fault(**fields: Any) -> str | None:
    given = {"text": None, "input_ids": [30], "sampling_params": {}} | fields
    return requests.request_fault(SimpleNamespace(**given))


def test_choices() -> None:
    assert fault(sampling_params={"n": requests.MAX_CHOICES}) is None
    for n in (0, -1, requests.MAX_CHOICES + 1, 10**9, 1.0, "2", None):
        assert "n: found" in (fault(sampling_params={"n": n}) or "")
    assert "n: found" in (fault(input_ids=[[1], [2]], sampling_params=[{}, {"n": 10**9}]) or "")


def test_sequences() -> None:
    assert fault(input_ids=[[30]] * 64, sampling_params={"n": 64}) is None
    assert "prompts times n: found 4160" in (fault(input_ids=[[30]] * 65, sampling_params={"n": 64}) or "")
    assert fault(input_ids=[30] * 100_000, sampling_params={"n": 64}) is None, "one prompt"
    assert "4097" in (fault(text=["x"] * 4097, input_ids=None) or "")


@pytest.mark.parametrize("name", requests.NOT_OFFERED)
def test_fields_that_are_not_offered(name: str) -> None:
    assert name in (fault(**{name: "x"}) or "")
    assert fault(**{name: None}) is None and fault(**{name: False}) is None


def test_counts() -> None:
    """Arrays of one value for each prompt."""
    assert fault(logprob_start_len=0, token_ids_logprob=[1, 2]) is None
    assert "one prompt" in (fault(logprob_start_len=[0]) or "") and "one prompt" in (fault(rid=["a"]) or "")
    assert fault(input_ids=[[30], [31]], logprob_start_len=[0, 1], token_ids_logprob=[[1], [2]]) is None
    assert fault(input_ids=[[30], [31]], token_ids_logprob=[1, 2, 3]) is None, "the same for both"
    assert "found 1 entries" in (fault(input_ids=[[30], [31]], token_ids_logprob=[[1]]) or "")


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({"logprob_start_len": -2}, "logprob_start_len: found -2; expected -1 to 3"),
        ({"logprob_start_len": 4}, "logprob_start_len: found 4"),
        ({"logprob_start_len": True}, "logprob_start_len: found True"),
        ({"logprob_start_len": [0]}, "logprob_start_len: found [0]"),
        ({"token_ids_logprob": [512]}, "token_ids_logprob: found [512]"),
        ({"token_ids_logprob": [-1]}, "token_ids_logprob: found [-1]"),
        ({"token_ids_logprob": [[1]]}, "token_ids_logprob: found [[1]]"),
        ({"token_indices_to_pool": [999]}, "token_indices_to_pool: found [999]; expected integers from 0 to 2"),
        ({"logprob_start_len": 3, "token_ids_logprob": [0, 511], "token_indices_to_pool": [0, 2]}, None),
    ],
)
def test_logprobs_in_both_processes(fields: dict[str, Any], part: str | None) -> None:
    """What the front end refuses, a scheduler refuses, too, of requests from elsewhere."""
    front = requests.logprob_fault(SimpleNamespace(**fields), 3, 512)
    given = {"logprob_start_len": -1, "token_indices_to_pool": None, "token_ids_logprob": None} | fields
    logprob, refusals = SimpleNamespace(token_ids_logprob=given.pop("token_ids_logprob")), list[str]()
    request = SimpleNamespace(
        **given,
        logprob=logprob,
        to_finish=None,
        origin_input_ids=[1, 2, 3],
        vocab_size=512,
        set_finish_with_abort=refusals.append,
    )
    waits = requests.validate_when_admitted(lambda manager, request: True, None, request)
    if part is None:
        assert front is None and waits and not refusals
    else:
        assert part in (front or "") and not waits and part in refusals[0]


def test_stop_strings() -> None:
    def stops(**fields: Any) -> str:
        params = {
            "n": 1,
            "temperature": 1.0,
            "sampling_seed": None,
            "beam_width": None,
            "top_k": 1,
            "repetition_penalty": 1.0,
        }
        params |= {
            "logit_bias": None,
            "stop_token_ids": None,
            "stop_regex_strs": None,
            "stop_regex": None,
            "stop": None,
        }
        params |= {"min_new_tokens": 0, "stop_strs": None, **dict.fromkeys(requests.GRAMMARS)}
        return requests.sampling_fault(SimpleNamespace(**params | fields), 512) or ""

    for empty in ({"stop_strs": [""]}, {"stop_strs": ["a", ""]}, {"stop": ""}, {"stop": ["a", ""]}, {"stop_strs": ""}):
        assert "empty string" in stops(**empty)
    assert not stops(stop_strs=["a"]) and not stops(min_new_tokens=2) and not stops(stop_strs=[], min_new_tokens=2)
    assert "min_new_tokens: does not delay" in stops(stop_strs=["a"], min_new_tokens=1)
    assert not stops(logit_bias={"0": 1.0, "511": -1.0})
    assert stops(logit_bias={"512": 1}) == "logit_bias: token id 512 is outside the vocabulary; expected 0 to 511"
    assert "temperature: found 1e+31; expected 1e+30 or less" in stops(temperature=1e31)
    assert "repetition_penalty: found 1e-21; expected 1e-20 or more" in stops(repetition_penalty=1e-21)
    assert not stops(temperature=1e30, repetition_penalty=1e-20)


def test_logits_stay_finite() -> None:
    """SGLang's sampler ends the scheduler where temperature and penalties make a logit infinite, or NaN of -inf."""
    largest = torch.tensor([2.0 * 2**20, -torch.inf]) / MIN_REPETITION_PENALTY
    for temperature in (1e-6, MAX_TEMPERATURE):
        found = (largest / torch.tensor(temperature)).softmax(0)
        assert not found.isnan().any() and found[0] == 1


def test_malformed_requests_are_the_clients_fault() -> None:
    def expand(request: Any) -> None:
        raise IndexError("list index out of range")

    given = SimpleNamespace(text="x", input_ids=None, sampling_params={}, is_single=True, rid="a")
    with pytest.raises(ValueError, match="malformed"):
        requests.normalize_request(expand, given)
    assert given.is_single and given.rid is None, "SGLang asks for both when the stream has ended"
    given.rid = ["a", "b"]
    with pytest.raises(ValueError, match="rid"):
        requests.normalize_request(lambda request: None, given)


def test_length_that_is_advertised() -> None:
    config, tokenizer = SimpleNamespace(context_len=1000), SimpleNamespace(model_max_length=2**60)
    manager = SimpleNamespace(max_req_input_len=None, model_config=config, tokenizer=tokenizer)
    requests.advertise_length(manager)
    assert config.context_len == tokenizer.model_max_length == 1000
    manager.max_req_input_len = 500
    requests.advertise_length(manager)
    assert config.context_len == tokenizer.model_max_length == 504


def test_room_that_a_pool_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pool tokens stand first, the longest request and the longest prompt fifth and sixth."""
    monkeypatch.setattr(settings, "resolved", lambda name: {"page_size": 256}[name])
    info = (16384, 1, 2, 3, 16383, 16378, "seed")
    assert requests.worker_info(lambda worker: info, None) == (16384, 1, 2, 3, 15873, 15868, "seed")
    ample = (10**6, 1, 2, 3, 16383, 16378, "seed")
    assert requests.worker_info(lambda worker: ample, None) == ample


# --- keys and ports ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("api_key", "admin_api_key"), [("ä", None), (None, "a b"), ("", None), (None, "a\n"), ("same", "same")]
)
def test_keys_that_cannot_be_sent(api_key: str | None, admin_api_key: str | None) -> None:
    with pytest.raises(ConfigError, match="api-key"):
        arguments.check_keys({"api_key": api_key, "admin_api_key": admin_api_key})


def test_keys_are_left_out() -> None:
    arguments.check_keys({"api_key": "one", "admin_api_key": "other"})
    given = {"api_key": "one", "admin_api_key": "other", "ssl_keyfile_password": None, "port": 1}
    hidden = {"api_key": settings.REDACTED, "admin_api_key": settings.REDACTED, "ssl_keyfile_password": None, "port": 1}
    assert arguments.redacted(lambda server_args: given, None) == hidden
    server_args = SimpleNamespace(_launch_command="--api-key one --admin-api-key=other --port 1")
    settings.redact_launch_command(server_args, ["one", "other"])
    assert "one" not in server_args._launch_command and "other" not in server_args._launch_command


def test_only_a_server_needs_its_port(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Resolving arguments does not look at it, as an engine without a server has no port."""
    (tmp_path / "config.json").write_text('{"architectures": ["DeepseekV4ForCausalLM"]}')
    with socket.create_server(("127.0.0.1", 0)) as listener:
        here = {"model_path": str(tmp_path), "host": "127.0.0.1", "port": listener.getsockname()[1]}
        given = settings.unset_arguments() | here
        monkeypatch.setattr(settings, "given_arguments", lambda server_args: given)
        with pytest.raises(ConfigError, match="cannot listen"):
            arguments.launch_server(lambda server_args: None, None)
        checks = ("arguments", "keys", "simulation", "activation_mode", "target", "files_beside")
        for name in checks:
            monkeypatch.setattr(arguments, f"check_{name}", lambda *args: None)
        for name in ("redact_launch_command", "declare"):
            monkeypatch.setattr(settings, name, lambda *args, **fields: None)
        monkeypatch.setattr(arguments, "bind_threads", lambda ranks: None)
        verified = SimpleNamespace(raw={}, config=SimpleNamespace(vocab_size=1), inventory=None)
        monkeypatch.setattr(arguments, "served", lambda *args: verified)
        monkeypatch.setattr(arguments, "_verified_at_start", [])
        arguments.preflight(None)
    assert arguments.launch_server(lambda server_args: "launched", None) == "launched"


def test_a_grammar_of_tools_is_the_tools_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "serves_our_model", lambda: True)
    monkeypatch.setattr(settings, "resolved", {}.get)
    long, deep = "x" * (requests.MAX_GRAMMAR_CHARACTERS + 1), "[" * 200 + "]" * 200

    def params(request: Any, tool_call_constraint: Any = None) -> dict[str, Any]:
        return {"regex": request, **({"structural_tag": tool_call_constraint} if tool_call_constraint else {})}

    for text, word in ((long, "65537 characters"), (deep, "deep")):
        with pytest.raises(ValueError, match=f"^tools: the structural_tag that tool_choice makes of them: .*{word}"):
            requests.bound_tools(params, None, tool_call_constraint=text)
    assert requests.bound_tools(params, None, tool_call_constraint="{}")["structural_tag"] == "{}"
    # The client's own: refused later, under its own name.
    assert requests.bound_tools(params, long, tool_call_constraint="{}")["regex"] == long
    assert requests.bound_tools(params, long)["regex"] == long


@pytest.mark.parametrize(
    ("flags", "accepted", "refused"),
    [
        ({}, 50, None),
        ({"constrained_json_max_whitespace_cnt": 4}, 4, 5),
        ({"constrained_json_disable_any_whitespace": True}, 1, 2),
    ],
    ids=str,
)
def test_flags_of_whitespace_hold_for_calls(
    flags: dict[str, Any], accepted: int, refused: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the grammar of a forced call, as SGLang asks xgrammar for it."""
    monkeypatch.setattr(requests, "serves_our_model", lambda: True)
    monkeypatch.setattr(settings, "resolved", flags.get)
    tag = xgrammar.get_model_structural_tag("deepseek_v4", tools=[WEATHER], tool_choice="required", reasoning=False)

    def params(request: Any, tool_call_constraint: Any = None) -> dict[str, Any]:
        return {"structural_tag": tool_call_constraint and tool_call_constraint.model_dump_json()}

    text = requests.bound_tools(params, None, tool_call_constraint=tag)["structural_tag"]
    grammar = xgrammar.GrammarCompiler(xgrammar.TokenizerInfo([])).compile_structural_tag(text)
    for spaces, expected in ((accepted, True), (refused, False)):
        if spaces is not None:
            call = CALL.replace("INDENT", " " * spaces)
            assert xgrammar.GrammarMatcher(grammar, terminate_without_stop_token=True).accept_string(call) == expected
