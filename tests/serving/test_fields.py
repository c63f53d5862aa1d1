"""The table of request fields: it knows every field of SGLang's classes, and its samples are what it says."""

from __future__ import annotations

import dataclasses
import json

import pytest

from nvfp4_sgl.serving.endpoints import PATHS, Kind
from nvfp4_sgl.serving.fields import administrative, checks, native
from nvfp4_sgl.serving.fields import field as fields
from nvfp4_sgl.serving.fields.bodies import BODIES, body_fault
from nvfp4_sgl.serving.fields.field import Field, Table, Verdict, object_fault
from nvfp4_sgl.serving.fields.generate import GENERATE, SAMPLING_PARAMS
from nvfp4_sgl.serving.fields.openai import GENERATION
from tests.support.request_bodies import OPENAI_BASES

MESSAGES, PROTOCOL = "sglang.srt.managers.io_struct", "sglang.srt.entrypoints.openai.protocol"

CLASSES: dict[str, Table] = {
    f"{MESSAGES}:GenerateReqInput": GENERATE,
    "sglang.srt.sampling.sampling_params:SamplingParams": SAMPLING_PARAMS,
    f"{PROTOCOL}:TokenizeRequest": native.TOKENIZE,
    f"{PROTOCOL}:DetokenizeRequest": native.DETOKENIZE,
    f"{PROTOCOL}:ScoringRequest": native.SCORE,
    f"{PROTOCOL}:EmbeddingRequest": native.EMBEDDINGS,
    f"{MESSAGES}:ParseFunctionCallReq": native.PARSE_FUNCTION_CALL,
    f"{MESSAGES}:SeparateReasoningReqInput": native.SEPARATE_REASONING,
    f"{MESSAGES}:AbortReq": administrative.ABORT_REQUEST,
    f"{MESSAGES}:ConfigureLoggingReq": administrative.CONFIGURE_LOGGING,
    f"{MESSAGES}:PauseGenerationReqInput": administrative.PAUSE_GENERATION,
    f"{MESSAGES}:ContinueGenerationReqInput": administrative.CONTINUE_GENERATION,
    f"{MESSAGES}:ProfileReq": administrative.START_PROFILE,
    f"{MESSAGES}:UpdateWeightFromDiskReqInput": administrative.UPDATE_WEIGHTS,
}
"""SGLang's classes, each with the table of its fields."""

TABLES: dict[str, Table] = {**BODIES, "sampling_params": SAMPLING_PARAMS}

RECORDS = [(f"{where} {name}", field) for where, table in TABLES.items() for name, field in table.items()]


def field_names(path: str) -> set[str]:
    """Names that a client of the HTTP path may send for a dataclass, pydantic model or msgspec structure."""
    from pkgutil import resolve_name

    cls = resolve_name(path)
    if dataclasses.is_dataclass(cls):
        return {one.name for one in dataclasses.fields(cls)}
    if hasattr(cls, "model_fields"):
        return set(cls.model_fields)
    return set(cls.__struct_fields__)


@pytest.mark.parametrize("path", CLASSES)
def test_every_field_of_sglang_has_its_verdict(path: str) -> None:
    known, listed = field_names(path), set(CLASSES[path])
    assert not known - listed, "fields of SGLang without a verdict"
    assert not listed - known, "fields that SGLang does not have"


def test_every_path_with_a_body_has_its_table() -> None:
    paths = {path for path, kind in PATHS.items() if kind is not Kind.READ}
    assert set(BODIES) == paths


@pytest.mark.parametrize(("name", "field"), RECORDS, ids=[name for name, _ in RECORDS])
def test_samples(name: str, field: Field) -> None:
    """Values inside are taken, values outside are refused by name with what was found."""
    where = name.split()[-1]
    if field.null:
        assert field.fault(where, None) is None
    if field.check is None:
        assert field.verdict is Verdict.REFUSED and where in (field.fault(where, "x") or "")
        return
    for value in field.check.inside:
        harmless = field.harmless is not None and field.harmless.fault(where, value) is None
        if field.is_offered or harmless or field.verdict is not Verdict.OFFERED:
            assert field.fault(where, value) is None, value
        else:
            assert field.why in (field.fault(where, value) or "")
    for value in field.check.outside:
        assert (field.fault(where, value) or "").startswith(where), value


def test_reasons() -> None:
    for name, field in RECORDS:
        assert bool(field.why) == (field.verdict is not Verdict.OFFERED or field.mode is not None), name


def test_a_mode_offers_its_fields(monkeypatch: pytest.MonkeyPatch) -> None:
    seed = SAMPLING_PARAMS["sampling_seed"]
    assert "not honoured" in (seed.fault("sampling_seed", 5) or "")
    monkeypatch.setattr(fields, "MODES", {"seeds"})
    assert seed.fault("sampling_seed", 5) is None and seed.fault("sampling_seed", 2**63) is not None


def test_details_of_drafts_where_something_is_drafted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other servers take what asks for nothing."""
    details = GENERATION["return_spec_tokens_details"]
    assert details.fault("details", False) is None and details.fault("details", None) is None
    assert (
        details.fault("details", True) == "details: this server runs no draft (--speculative-algorithm); leave it out"
    )
    monkeypatch.setattr(fields, "MODES", {"drafting"})
    assert details.fault("details", True) is None and details.fault("details", 1) is not None


@pytest.mark.parametrize(
    ("body", "part"),
    [
        (b'{"text": "x", "sampling_params": {"temperature": NaN}}', "found NaN"),
        (b'{"text": "x", "sampling_params": {"top_k": 1, "top_k": 2}}', "found 'top_k' twice in an object"),
        (b'{"text": "x", "sampling_params": {"logit_bias": {"3": -Infinity}}}', "found -Infinity"),
        (b'{"text": "x", "sampling_params": {"logit_bias": {"1": 5, "01": -5}}}', "logit_bias: found the token '01'"),
        (b'{"text": "x", "sampling_params": {"logit_bias": {"00": 5}}}', "logit_bias: found the token '00'; expected"),
        (b'{"text": "x", "txet": 1}', "txet: unknown field"),
        (b'{"text": "x", "sampling_params": [{}, {"top_q": 1}]}', "sampling_params[1].top_q: unknown field"),
        (b'{"text": "x", "sampling_params": {"top_k": true}}', "sampling_params"),
        (b'{"input_ids": [1, 2, true]}', "input_ids: token id True at 2"),
        (b'{"input_ids": [1' + b"0" * 5000 + b"]}", "body: expected JSON"),
        (b'{"input_ids": [-1]}', "input_ids: token id -1"),
        (b'{"text": "x",', "body: expected JSON"),
        (rb'{"text": "ab\ud83d"}', "text: found the lone surrogate U+D83D at character 2; expected text"),
        (rb'{"text": ["a", "\uDE00b"]}', "text[1]: found the lone surrogate U+DE00 at character 0"),
        (b'{"text": "\xed\xa0\x80"}', "text: found the lone surrogate U+D800 at character 0"),
        (rb'{"text": "x", "sampling_params": {"stop": "\ud800\ud800"}}', "sampling_params.stop: found the lone"),
        (rb'{"t\ud800": 1}', "body: found a lone surrogate in the name of a field"),
    ],
)
def test_bodies(body: bytes, part: str) -> None:
    assert part in (body_fault("/generate", body) or "")


def test_a_whole_pair_is_taken() -> None:
    assert body_fault("/generate", rb'{"text": "\ud83d\ude00 \\ud83d"}') is None


def test_an_abort_names_what_it_aborts() -> None:
    for body in (b"{}", b'{"rid": null}', b'{"abort_all": false}'):
        assert "rid: missing" in (body_fault("/abort_request", body) or "")
    assert body_fault("/abort_request", b'{"rid": "x"}') is None
    assert body_fault("/abort_request", b'{"abort_all": true}') is None
    assert "x: unknown field" in (body_fault("/flush_cache", b'{"x": 1}') or "")


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
def test_a_forced_call_needs_its_tool(path: str) -> None:
    """SGLang says so, too, with a traceback in the log for each such request."""

    def fault(kind: str, tools: list[str] | None, **more: str) -> str | None:
        body = {**OPENAI_BASES[path], "tool_choice": {"type": kind, **more}}
        if tools is not None:
            body["tools"] = [{"name": name, "input_schema": {"type": "object"}} for name in tools]
        return body_fault(path, json.dumps(body).encode())

    without: tuple[list[str] | None, ...] = (None, [])
    for tools in without:
        assert "tools: missing" in (fault("any", tools) or "") and "tools: missing" in (
            fault("tool", tools, name="f") or ""
        )
        assert fault("auto", tools) is None and fault("none", tools) is None
    assert fault("tool", ["f"], name="g") == "tool_choice.name: found 'g'; expected the name of one of the tools"
    assert fault("tool", ["f", "g"], name="g") is None and fault("any", ["f"]) is None


def test_a_body_without_a_required_field() -> None:
    table = {"text": fields.offered(checks.text(), required=True)}
    assert object_fault(table, {}) == "text: missing; expected a string"
    assert "text: found None" in (object_fault(table, {"text": None}) or "")
    assert object_fault(table, {"text": "x"}) is None
