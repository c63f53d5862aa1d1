"""What is running is said, in ``/server_info`` and in the log."""

from __future__ import annotations

import re

import pytest

from nvfp4_sgl.sglang_defaults import CPU_DEFAULTS
from nvfp4_sgl.targets.choose import choose
from tests.support.server import Server
from tests.support.start_log import STAGES, wait_for_last_stage

pytestmark = [pytest.mark.server]


def test_what_is_running(server: Server) -> None:
    info = server.info()
    assert info["model_class"] == "nvfp4_sgl.serving.model.DeepseekV4ForCausalLM"
    assert info["attention_backend"] == "nvfp4_sgl.serving.backend.Nvfp4AttentionBackend"
    assert info["kv_pool"] == "nvfp4_sgl.serving.kv_pool.ExactRowsPool"
    assert info["kv_rows"] == "exact rows in float32"
    assert info["activation_mode"] == "w4a16"
    assert info["dtype"] == "float32"
    assert info["weights"].startswith("nvfp4-full checkpoint /") and info["routing"] == "by the model"
    assert info["target"] == "cpu"
    assert info["boundaries"] == choose("cpu").boundaries.names()


def test_the_start_is_seven_lines(server: Server) -> None:
    wait_for_last_stage(server)
    lines = re.findall(r"nvfp4_sgl: ([\w-]+): (.*)", server.text())
    assert tuple(name for name, _ in lines) == STAGES
    said = dict(lines)
    assert all(re.search(r"\d+\.\d s", said[name]) for name in said if name not in ("memory", "boundaries"))
    assert (
        "verified" in said["config"] and "GB stored" in said["weights"] and "room for 16,384 tokens" in said["memory"]
    )
    assert re.search(r"\d+ of them, mtp\.\*, left out \(MTP draft\)", said["config"])
    assert (
        "target cpu, w4a16, float32, exact rows in float32, sampling by pytorch, routing by the model"
        in said["scheduler"]
    )
    names = choose("cpu").boundaries.names()
    assert said["boundaries"] == ", ".join(f"{name} {where.rpartition('.')[2]}" for name, where in names.items())


def test_defaults(server: Server) -> None:
    state = server.get("/server_info")
    assert {name: state[name] for name in CPU_DEFAULTS} == CPU_DEFAULTS
    assert state["attention_backend"] == "nvfp4_sgl"
    assert state["quantization"] is None
    assert (state["reasoning_parser"], state["tool_call_parser"]) == ("deepseek-v4", "deepseekv4")
    assert state["page_size"] == 256 and state["swa_full_tokens_ratio"] == 0.5
