"""The glue against the SGLang that is installed: names, defaults, pool shapes and sizes. Imports SGLang."""

from __future__ import annotations

import argparse
import ast
import inspect
import os
import re
import sys
from pkgutil import resolve_name
from typing import Any

import pytest
import torch

from nvfp4_sgl.checkpoint.beside import DEFAULTS
from nvfp4_sgl.errors import ConfigError
from nvfp4_sgl.numa import parse_cpus
from nvfp4_sgl.serving import arguments, kv_pool
from nvfp4_sgl.serving.sglang import ledger, settings
from nvfp4_sgl.serving.sglang.ledger import find
from nvfp4_sgl.serving.sglang.private import Private
from nvfp4_sgl.sglang_defaults import CPU_DEFAULTS, SAMPLERS, triton_cache
from tests.packaging.checkout import ROOT


@pytest.fixture(scope="module")
def unset() -> dict[str, Any]:
    """Every argument of SGLang as it is when no flag is given."""
    return settings.unset_arguments()


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"SGLANG_CACHE_DIR": ""},
        {"SGLANG_CACHE_DIR": "~/kernels"},
        {"SGLANG_CACHE_DIR": "~nobody-of-this-name/kernels"},
        {"SGLANG_CACHE_DIR": "/a", "TRITON_CACHE_DIR": "/b"},
        {"TRITON_CACHE_DIR": "~/kernels"},
    ],
    ids=str,
)
def test_triton_s_cache_is_where_sglang_puts_it(given: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt import environ

    for name in environ.third_party_cache_defaults():
        monkeypatch.setenv(name, "restored afterwards")
    for name in ("SGLANG_CACHE_DIR", "TRITON_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    found = triton_cache()
    environ.redirect_third_party_caches()
    assert str(found) == os.environ["TRITON_CACHE_DIR"]


def test_an_empty_folder_of_triton_s_cache_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels would go to the working folder, and no server would find them."""
    monkeypatch.setenv("TRITON_CACHE_DIR", "")
    with pytest.raises(ConfigError, match="TRITON_CACHE_DIR: expected a folder, found an empty value"):
        triton_cache()


def test_the_ledger_says_what_sglang_has() -> None:
    assert ledger.differences() == []


def test_a_changed_sglang_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that has gone and a parameter that has another name; each line says what fails."""
    path, parameters = ledger.HOOKS["cache_grammar"].path, ledger.HOOKS["cache_grammar"].parameters
    monkeypatch.setitem(ledger.NAMES, "find", Private("sglang.srt.nothing:find", "finds"))
    monkeypatch.setitem(ledger.HOOKS, "cache_grammar", Private(path, "caches", "self, name, value"))
    assert ledger.differences() == [
        "sglang.srt.nothing:find: missing (finds)",
        f"{path}: expected parameters (self, name, value), found ({parameters}) (caches)",
    ]


def test_samplers_are_those_of_nvidia_s_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that SGLang's parser takes but Huawei's and Intel's, which need their devices."""
    monkeypatch.delenv("SGLANG_KV_CANARY_ENABLE_TOKEN_ORACLE", raising=False)
    parser = argparse.ArgumentParser()
    find("ServerArgs").add_cli_args(parser)
    taken = parser._option_string_actions["--sampling-backend"].choices
    assert taken is not None and {*taken} == {*SAMPLERS, "ascend", "intel_xpu"}


def test_what_profiles_of_the_host_go_by(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stages that launch/profile_host names, and the functions behind which it times graphs."""
    monkeypatch.setattr(sys, "path", [str(ROOT / "launch"), *sys.path])
    from programs import profile_host, timed_server
    from sglang.srt.observability.scheduler_stage_metrics import SCHEDULER_STAGE_CATEGORIES

    assert profile_host.STAGES.keys() == {*SCHEDULER_STAGE_CATEGORIES}
    step, draft, extend = (ledger.parameters(resolve_name(path)) for path in timed_server.HOOKS)
    assert step == "self, forward_batch, pp_proxy_tensors"
    assert draft == extend == "self, shape_key, forward_batch"


def test_what_timed_graphs_read_of_their_runners() -> None:
    """Each attribute is one that SGLang's classes set: CI has no graph, whose hook would miss one."""
    tree = ast.parse((ROOT / "launch" / "programs" / "timed_server.py").read_text(encoding="utf-8"))
    classes = {
        "runner": "model_executor.runner.decode_cuda_graph_runner:DecodeCudaGraphRunner",
        "runner.model_runner": "model_executor.model_runner:ModelRunner",
        "runner.backend": "model_executor.runner_backend.full_cuda_graph_backend:FullCudaGraphBackend",
    }
    read = {(ast.unparse(node.value), node.attr) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    read = {(owner, name) for owner, name in read if owner in classes}
    assert {owner for owner, _ in read} == classes.keys()
    for owner, name in sorted(read):
        found = resolve_name(f"sglang.srt.{classes[owner]}")
        sources = [inspect.getsource(one) for one in found.__mro__[:-1]]
        set_somewhere = any(re.search(rf"\bself\.{name}(: [^=\n]+)? = ", source) for source in sources)
        assert hasattr(found, name) or set_somewhere, f"{owner}.{name}: not an attribute of {found.__name__}"


@pytest.mark.parametrize("name", arguments.LAYOUTS)
def test_other_layouts_of_pages_are_refused(name: str, unset: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    ours = arguments.LAYOUTS[name]
    assert getattr(find("envs"), name).get() == ours
    monkeypatch.setenv(name, ours.upper())
    arguments.check_arguments(unset)
    monkeypatch.setenv(name, "v41")
    with pytest.raises(arguments.UnsupportedError, match=f"{name}=v41: expected {ours}"):
        arguments.check_arguments(unset)


def test_values_that_leave_an_unsupported_argument_off(unset: dict[str, Any]) -> None:
    arguments.check_arguments(unset | {"dsv4_attn_backend": "flashmla", "cuda_graph_backend_prefill": "disabled"})
    arguments.check_arguments(unset | {"cuda_graph_config": {"decode": {"max_bs": 8}, "prefill": {"max_bs": 8}}})


def test_graphs_of_prompts_are_refused_in_json_too(unset: dict[str, Any]) -> None:
    from sglang.srt.model_executor.cuda_graph_config import default_cuda_graph_config, parse_cuda_graph_config_arg

    config = default_cuda_graph_config()
    arguments.check_arguments(unset | {"cuda_graph_config": config})
    config.prefill.backend = "full"
    for given in (config, parse_cuda_graph_config_arg('{"prefill": {"backend": "full"}}')):
        with pytest.raises(arguments.UnsupportedError, match="--cuda-graph-config: prefill backend full"):
            arguments.check_arguments(unset | {"cuda_graph_config": given})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_exact_pages(dtype: torch.dtype) -> None:
    """Shapes of the buffers, and that the sizing charges what they take."""
    pool_type, configurator_type = kv_pool.exact_rows_pool(), kv_pool.exact_rows_configurator()
    pool = pool_type.__new__(pool_type)
    pool.row_dtype, pool.qk_nope_head_dim, pool.qk_rope_head_dim = dtype, 448, 64
    kv = pool._make_kv_pool(
        size=1024,
        page_size=64,
        dtype=torch.bfloat16,
        layer_num=2,
        device="cpu",
        enable_memory_saver=False,
        global_page_size=256,
    )
    index = pool._make_indexer_pool(1024, 64, torch.bfloat16, 128, 2, "cpu", False, global_page_size=256)
    pages = (1024 + 256) // 64
    assert [(buffer.shape, buffer.dtype) for buffer in kv.kv_buffer] == [((pages, 64 * 512), dtype)] * 2
    buffers = index.contiguous_page_row_buffers()
    assert [(buffer.shape, buffer.dtype) for buffer in buffers] == [((pages, 64 * 128), dtype)] * 2

    sizing = configurator_type.__new__(configurator_type)
    sizing.row_bytes, sizing.attn_head_dim, sizing.indexer_head_dim = dtype.itemsize, 512, 128
    rows = 64 * pages
    assert sizing._get_paged_kv_bytes_per_token() * rows == kv.kv_buffer[0].nbytes
    both = kv.kv_buffer[0].nbytes + buffers[0].nbytes
    assert sizing._compressed_bytes_per_full_token(4) * rows * 4 == both
    assert sizing._compressed_bytes_per_full_token(128) * 128 == 512 * dtype.itemsize


def test_row_dtype() -> None:
    assert kv_pool.row_dtype("fp8_e4m3", "fp8_e4m3", torch.float32) is None
    assert kv_pool.row_dtype("bfloat16", "auto", torch.float32) is torch.float32
    assert kv_pool.row_dtype("bfloat16", "auto", torch.bfloat16) is torch.bfloat16
    assert kv_pool.row_dtype("bfloat16", "bfloat16", torch.float32) is torch.bfloat16


@pytest.mark.parametrize(
    ("cpus", "ranks", "text"),
    [
        ([0, 1], 2, "0|1"),
        ([0, 1, 2, 3], 2, "0,1|2,3"),
        ([4, 6, 9], 2, "4|6"),
        ([0, 1], 4, "0|1|0|1"),
        ([3], 2, "3|3"),
    ],
)
def test_split_cpus(cpus: list[int], ranks: int, text: str) -> None:
    assert arguments.split_cpus(cpus, ranks) == text
    for group in text.split("|"):
        assert parse_cpus(group) <= set(cpus)


def test_override_of_nothing() -> None:
    assert arguments.parse_overrides("{}") == arguments.parse_overrides(None) == {}
    assert arguments.parse_overrides('{"activation_mode": "w4a4"}') == {"activation_mode": "w4a4"}


def test_flags_win_over_the_platform_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what is unset is defaulted, and only for our architecture."""
    from types import SimpleNamespace

    from sglang.srt.platforms import current_platform

    monkeypatch.setattr(arguments, "is_our_checkpoint", lambda path: path == "ours")
    unset = dict.fromkeys(CPU_DEFAULTS) | {"dtype": "auto", "sleep_on_idle": False}
    raw = {"attention_backend": None}
    ours = SimpleNamespace(model_path="ours", _raw_input=raw, **unset)
    current_platform.apply_server_args_defaults(ours)
    assert {name: getattr(ours, name) for name in unset} == CPU_DEFAULTS

    given = dict.fromkeys(unset, 5)
    ours = SimpleNamespace(model_path="ours", _raw_input=raw, **given)
    current_platform.apply_server_args_defaults(ours)
    assert {name: getattr(ours, name) for name in unset} == given

    other = SimpleNamespace(model_path="other", _raw_input=raw, attention_backend="intel_amx", **unset)
    current_platform.apply_server_args_defaults(other)
    assert {name: getattr(other, name) for name in unset} == unset
    assert other.attention_backend == "torch_native"

    chosen = SimpleNamespace(model_path="other", _raw_input={"attention_backend": "triton"}, attention_backend="triton")
    current_platform.apply_server_args_defaults(chosen)
    assert chosen.attention_backend == "triton"


def test_defaults_of_sampling_have_the_bounds_of_sglang() -> None:
    from sglang.srt.sampling.sampling_params import SamplingParams

    for name, allowed in DEFAULTS.items():
        for value in (-1, 0, 0.5, 1, 2, 2.5):
            if allowed.whole and isinstance(value, float):
                continue
            try:
                SamplingParams(**{name: value}).verify(512)
            except ValueError:
                assert not allowed.allows(value), (name, value)
            else:
                assert allowed.allows(value), (name, value)
