"""Updates of weights without a server: what is asked for, who is busy, and ranks of which one refuses."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nvfp4_sgl.errors import CheckpointError, ConfigError, UnsupportedError
from nvfp4_sgl.serving import arguments, update_request, update_weights
from nvfp4_sgl.serving.endpoints import UPDATE_WEIGHTS as UPDATE
from nvfp4_sgl.serving.fields.administrative import UPDATE_WEIGHTS
from nvfp4_sgl.serving.guard import checked_request
from nvfp4_sgl.serving.model import DeepseekV4ForCausalLM
from nvfp4_sgl.serving.sglang import parallel, settings, weight_updates


def asked(**fields: Any) -> Any:
    """SGLang's request with its defaults."""
    from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqInput

    return UpdateWeightFromDiskReqInput(**{"model_path": "/somewhere", **fields})


def test_every_field_of_sglang_is_known() -> None:
    from sglang.srt.managers.io_struct import BaseReq, UpdateWeightFromDiskReqInput

    fields = set(UpdateWeightFromDiskReqInput.__struct_fields__) - set(BaseReq.__struct_fields__)
    assert set(update_request.HONOURED) == fields
    update_request.check_fields(asked(), ["model_path", "weight_version"])
    update_request.check_fields(asked(abort_all_requests=True, load_format="auto", weight_version="1"))
    for name, values in update_request.HONOURED.items():
        for value in values or ():
            assert UPDATE_WEIGHTS[name].fault(name, value) is None


WRONG: dict[str, tuple[Any, str]] = {
    "a number": (5, "found 5; expected the path of a directory"),
    "a list": (["DIR"], "found ['DIR']; expected the path of a directory"),
    "null": (None, "found None; expected the path of a directory"),
    "an object": ({}, "found {}; expected the path of a directory"),
    "empty": ("", "found ''; expected the path of a directory"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_paths_of_wrong_types(wrong: str) -> None:
    """They are refused before SGLang reads the body; the answer has the shape of every refused update."""
    value, message = WRONG[wrong]
    refusal, _ = checked_request(UPDATE, json.dumps({"model_path": value}).encode())
    assert refusal is not None and refusal.status == 400
    found = refusal.as_json(UPDATE)
    assert {name: found[name] for name in ("success", "message", "num_paused_requests")} == {
        "success": False,
        "message": f"model_path: {message}",
        "num_paused_requests": 0,
    }
    assert "success" not in refusal.as_json("/generate")


def test_bodies_of_updates() -> None:
    whole = {"model_path": "DIR", "weight_version": None, "flush_cache": True, "token_step": 0, "manifest": None}
    assert checked_request(UPDATE, json.dumps(whole).encode())[0] is None
    for name, value in {
        "weight_version": 2,
        "load_format": "dummy",
        "abort_all_requests": None,
        "flush_cache": False,
        "is_async": None,
        "token_step": False,
        "manifest": {},
        "model_paht": "DIR",
    }.items():
        refusal, _ = checked_request(UPDATE, json.dumps({"model_path": "DIR", name: value}).encode())
        assert refusal is not None and refusal.message.startswith(f"{name}: "), name
    refusal, _ = checked_request(UPDATE, b"{}")
    assert refusal is not None and refusal.message == "model_path: missing; expected the path of a directory"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("flush_cache", False), ("load_format", "dummy"), ("is_async", True), ("keep_pause", True)),
        *(("manifest", {}), ("recapture_cuda_graph", True), ("token_step", 3), ("torch_empty_cache", True)),
    ],
)
def test_values_that_are_not_honoured(name: str, value: Any) -> None:
    with pytest.raises(UnsupportedError, match=f"^{name}: found"):
        update_request.check_fields(asked(**{name: value}))


def test_fields_that_nobody_knows_and_paths_that_are_none() -> None:
    with pytest.raises(UnsupportedError, match="^model_paht: not honoured"):
        update_request.check_fields(asked(), ["model_path", "model_paht"])
    for path in ("", "a\0b"):
        with pytest.raises(ConfigError, match="^model_path"):
            update_request.check_fields(asked(model_path=path))


def test_tokenizers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    served, same, other, none = (tmp_path / name for name in ("served", "same", "other", "none"))
    for folder, text in ((served, "a"), (same, "a"), (other, "b"), (none, None)):
        folder.mkdir()
        if text:
            (folder / "tokenizer.json").write_text(text)
    monkeypatch.setattr(settings, "resolved", lambda name: str(served))
    for folder in (served, same, none):
        update_request.check_tokenizer(folder)
    with pytest.raises(UnsupportedError, match=r"other/tokenizer\.json: differs"):
        update_request.check_tokenizer(other)


def test_a_busy_scheduler_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(update_request, "BUSY_PERIOD", 0.0)
    answers = [(False, update_request.BUSY, 0)] * 3 + [(True, "replaced", 0), (False, "never", 0)]

    async def ask(manager: Any, request: Any) -> Any:
        return answers.pop(0)

    assert asyncio.run(update_request.dispatch_update(ask, None, None)) == (True, "replaced", 0)
    monkeypatch.setattr(update_request, "BUSY_SECONDS", 0.0)
    answers[:0] = [(False, update_request.BUSY, 0)] * 2
    assert asyncio.run(update_request.dispatch_update(ask, None, None))[1] == update_request.BUSY


class Model(DeepseekV4ForCausalLM):
    """Counts how often its weights are replaced."""

    def __init__(self) -> None:
        self.__dict__.update(replaced=0, verified=None)

    def replace_weights(self, found: Any) -> None:
        self.__dict__["replaced"] += 1


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Model:
    """A model whose checkpoints are always right."""
    found = SimpleNamespace(inventory=SimpleNamespace(directory="DIR"), describe=lambda: "a checkpoint")
    monkeypatch.setattr(arguments, "served", lambda directory, load_format, overrides: found)
    monkeypatch.setattr(arguments, "resolved_overrides", dict)
    for name in ("check_fits", "check_memory", "wait_for_device"):
        monkeypatch.setattr(update_weights, name, lambda *args: None)
    monkeypatch.setattr(parallel, "tp_rank", lambda: 0)
    monkeypatch.setattr(weight_updates, "finish_update", lambda updater, request: True)
    monkeypatch.setattr(weight_updates, "update_output", lambda success, message: (success, message))
    return Model()


def replace(model: Model, *, idle: bool = True) -> Any:
    worker = SimpleNamespace(model_runner=SimpleNamespace(model=model))
    updater = SimpleNamespace(tp_worker=worker, draft_worker=None, is_fully_idle=lambda: idle)
    return update_weights.replace_weights(lambda *args: None, updater, SimpleNamespace(model_path="DIR"))


def test_no_rank_replaces_if_another_refuses(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_updates, "gather", lambda updater, refusal: [refusal, "rank 1 cannot read it"])
    assert replace(model) == (False, "rank 1 cannot read it") and model.replaced == 0
    monkeypatch.setattr(weight_updates, "gather", lambda updater, refusal: [refusal, None])
    assert replace(model)[0] and model.replaced == 1
    assert replace(model, idle=False) == (False, update_request.BUSY) and model.replaced == 1


def test_what_fails_after_the_first_tensor_ends_the_process(
    model: Model, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(weight_updates, "gather", lambda updater, refusal: [refusal])

    def fail(found: Any) -> None:
        raise CheckpointError("tensor 'x' in FILE: expected a number")

    for name, value in ((model, fail), (weight_updates, lambda *args: False)):
        with monkeypatch.context() as patch:
            if name is model:
                patch.setitem(model.__dict__, "replace_weights", value)
            else:
                patch.setattr(weight_updates, "finish_update", value)
            with pytest.raises(SystemExit):
                replace(model)
    first, second = capfd.readouterr().err.strip().splitlines()
    assert "failed half-way" in first and "tensor 'x' in FILE" in first
    assert "failed half-way" in second and "prefix cache" in second


@pytest.mark.parametrize(("algorithm", "device"), [("DSPARK", "cuda"), ("EAGLE", "cuda")])
def test_drafts_that_are_not_replaced(algorithm: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "draft_algorithm", lambda: algorithm)
    monkeypatch.setattr(settings, "resolved", lambda name: device)
    with pytest.raises(UnsupportedError, match=f"{algorithm} on {device}: not implemented; restart the server"):
        update_request.check_fits(SimpleNamespace(is_dummy=False), None)  # type: ignore[arg-type]
