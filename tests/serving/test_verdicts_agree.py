"""``inspect``, ``doctor`` and a server's pre-flight give one verdict on a config.json."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from pkgutil import resolve_name
from types import SimpleNamespace
from typing import Any

import pytest

from nvfp4_sgl import doctor
from nvfp4_sgl.checkpoint.verified import verify
from nvfp4_sgl.errors import Nvfp4SglError
from nvfp4_sgl.reports.inspection import inspect
from nvfp4_sgl.serving import arguments
from nvfp4_sgl.serving.sglang import settings
from nvfp4_sgl.serving.sglang.hooked import HOOKS

ABSENT = object()

SERVED: dict[str, dict[str, Any]] = {
    "as released": {},
    "w4a4": {"activation_mode": "w4a4"},
    "a field of no meaning": {"a_note": "kept"},
    "another dtype": {"torch_dtype": "float32"},
}
REFUSED: dict[str, dict[str, Any]] = {
    "V4.1": {"model_type": "deepseek_v41"},
    "V3": {"model_type": "deepseek_v3"},
    "no model_type": {"model_type": ABSENT},
    "no architecture": {"architectures": ABSENT},
    "another architecture first": {"architectures": ["LlamaForCausalLM", "DeepseekV4ForCausalLM"]},
    "architectures as text": {"architectures": "DeepseekV4ForCausalLM"},
    "an unknown activation_mode": {"activation_mode": "w8a8"},
    "activation_mode as a number": {"activation_mode": 4},
    "another activation": {"hidden_act": "gelu"},
    "tied embeddings": {"tie_word_embeddings": True},
    "no layers": {"num_hidden_layers": 0},
    "layers as text": {"num_hidden_layers": "2"},
    "another number of layers": {"num_hidden_layers": 1},
    "no context": {"max_position_embeddings": 0},
    "another rope": {"rope_scaling": {"type": "linear", "factor": 2.0}},
    "another routing": {"scoring_func": "softmax"},
    "a ratio of none": {"compress_ratios": ABSENT},
    "FP8 by its claim": {"quantization_config": {"quant_method": "fp8", "weight_block_size": [64, 64]}},
}


def by_inspect(directory: Path) -> str | None:
    """Why ``inspect`` says that no CPU serves it; ``None`` if one does."""
    try:
        return inspect(verify(directory)).refused["cpu"]
    except Nvfp4SglError as error:
        return str(error)


def by_doctor(directory: Path) -> str | None:
    return "; ".join(doctor.examine(directory).problems) or None


@pytest.fixture
def by_server(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], str | None]:
    """Why a server would end before it starts a process, or would not be ours."""
    from sglang.srt.arg_groups.arg_utils import record_fields
    from sglang.srt.server_args import ServerArgs

    record = ServerArgs(model_path="none")
    unset = {field.name: getattr(record, field.name) for field in record_fields(ServerArgs)}
    monkeypatch.setattr(settings, "declare", lambda *_, **__: None, raising=False)
    monkeypatch.setattr(arguments, "_verified_at_start", [])
    for name in arguments.CRASH_DIAGNOSTICS:
        monkeypatch.setenv(name, os.environ.get(name, "0"))

    def verdict(directory: Path) -> str | None:
        if not arguments.is_our_checkpoint(directory):
            return "not ours"
        monkeypatch.setattr(settings, "given_arguments", lambda _: unset | {"model_path": str(directory)})
        try:
            arguments.preflight(SimpleNamespace())
        except Nvfp4SglError as error:
            return str(error)
        resolve_name(HOOKS["load_hf_config"].path)(str(directory), trust_remote_code=False)
        return None

    return verdict


@pytest.mark.parametrize("case", [*SERVED, *REFUSED])
def test_one_verdict(
    case: str,
    tiny_checkpoints: Callable[[str], Path],
    tmp_path: Path,
    by_server: Callable[[Path], str | None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("nvfp4_sgl.targets.choose.detect_target", lambda: "cpu")
    checkpoint = tmp_path / "checkpoint"
    shutil.copytree(tiny_checkpoints("nvfp4-full"), checkpoint, copy_function=os.link)
    raw = json.loads((checkpoint / "config.json").read_text())
    for field, value in (SERVED | REFUSED)[case].items():
        raw[field] = value
        if value is ABSENT:
            del raw[field]
    (checkpoint / "config.json").unlink()
    (checkpoint / "config.json").write_text(json.dumps(raw))
    found = {"inspect": by_inspect(checkpoint), "doctor": by_doctor(checkpoint), "server": by_server(checkpoint)}
    assert {name: reason is None for name, reason in found.items()} == dict.fromkeys(found, case in SERVED), found
