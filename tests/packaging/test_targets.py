"""What a target is said to run is what the decoder is built of, and what it does not run is refused before loading."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from nvfp4_sgl.checkpoint.storage import Storage
from nvfp4_sgl.config import LayerKind, ModelConfig
from nvfp4_sgl.errors import CheckpointError, ConfigError, UnsupportedError
from nvfp4_sgl.ops.modes import ActivationMode
from nvfp4_sgl.serving import arguments
from nvfp4_sgl.targets.choose import choose
from nvfp4_sgl.targets.requirements import check_target
from nvfp4_sgl.targets.target import modes, words
from tests.support.released import FLASH, PRO, config_json

GIVEN = {"context_length": None, "device": None, "dtype": "auto", "kv_cache_dtype": "auto", "tp_size": 1}


class Stored:
    """An inventory whose matrices are all stored alike, but for some."""

    def __init__(self, default: Storage, others: dict[str, Storage] | None = None):
        self._default, self._others = default, others or {}

    def storage(self, stem: str) -> Storage:
        return self._others.get(stem, self._default)


ALL_NVFP4: Any = Stored(Storage.NVFP4)


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    def set_target(target: str) -> None:
        monkeypatch.setattr(arguments, "detect_target", lambda: target)

    return set_target


@pytest.mark.parametrize("target", words())
def test_every_boundary_has_an_implementation_of_the_target(target: str):
    folder = "reference" if target == "cpu" else "fused"
    names = choose(target).boundaries.names()
    assert all(where.startswith(f"nvfp4_sgl.targets.{folder}.") for where in names.values()), names


def test_hopper_in_both_modes_and_sm100_differ_in_their_gemms_alone():
    chosen = [choose("sm_90a", mode) for mode in modes("sm_90a")] + [choose("sm_100a")]
    for one, other in itertools.combinations([choice.boundaries.names() for choice in chosen], 2):
        differing = {name for name in one if one[name] != other[name]}
        assert differing == {"plan", "project_input", "project", "project_groups", "experts"}


def test_a_target_is_chosen_in_its_own_mode_unless_another_is_asked_for():
    for target in words():
        assert choose(target).mode is modes(target)[0]
        assert [choose(target, mode).mode for mode in modes(target)] == list(modes(target))
    with pytest.raises(UnsupportedError, match="activation_mode 'w4a16': on sm_100a expected one of w4a4"):
        choose("sm_100a", ActivationMode.W4A16)


@pytest.mark.parametrize(
    ("target", "given", "raw", "message"),
    [
        ("sm_90a", {"dtype": "float32"}, {}, "--dtype float32: expected one of auto, bfloat16 on sm_90a"),
        ("sm_90a", {"kv_cache_dtype": "bfloat16"}, {}, "--kv-cache-dtype bfloat16: expected one of auto, fp8_e4m3"),
        ("sm_90a", {"device": "cpu"}, {}, "--device cpu: this machine's target is sm_90a"),
        ("sm_90a", {}, {"activation_mode": "w8a8"}, "activation_mode 'w8a8': on sm_90a expected one of w4a16, w4a4"),
        ("sm_100a", {}, {"activation_mode": "w4a16"}, "activation_mode 'w4a16': on sm_100a expected one of w4a4"),
        ("cpu", {"dtype": "float16"}, {}, "--dtype float16: expected one of auto, float32"),
        ("cpu", {"tp_size": 3}, {}, "--tp-size 3: o_groups"),
    ],
)
def test_options_that_a_target_does_not_have(
    target: str, given: Any, raw: Any, message: str, on: Callable[[str], None]
):
    on(target)
    with pytest.raises((ConfigError, UnsupportedError), match=message):
        arguments.check_target(GIVEN | given, raw, ModelConfig.from_dict(config_json(FLASH)), ALL_NVFP4)


@pytest.mark.parametrize("target", words())
@pytest.mark.parametrize("base", [FLASH, PRO], ids=["flash", "pro"])
def test_options_that_it_has(target: str, base: Any, on: Callable[[str], None]):
    on(target)
    config = ModelConfig.from_dict(config_json(base))
    for size in (1, 2, 4, 8):
        arguments.check_target(GIVEN | {"tp_size": size}, {}, config, ALL_NVFP4)


def test_matrices_that_sm100_does_not_read_are_named():
    config = ModelConfig.from_dict(config_json(FLASH))
    others = {"layers.3.attn.wo_a": Storage.FP8_FLOAT_SCALES, "layers.5.ffn.experts.7.w2": Storage.FP8}
    with pytest.raises(UnsupportedError) as error:
        check_target("sm_100a", config, 1, Stored(Storage.NVFP4, others).storage)
    for text in (
        "2 of ",
        "'layers.3.attn.wo_a.weight' (FP8, float scales)",
        "'layers.5.ffn.experts.7.w2.weight' (FP8)",
    ):
        assert text in str(error.value)
    check_target("sm_90a", config, 1, Stored(Storage.FP8).storage)


def test_hopper_in_w4a4_takes_what_sm100_takes():
    config, w4a4 = ModelConfig.from_dict(config_json(FLASH)), ActivationMode.W4A4
    check_target("sm_90a", config, 1, ALL_NVFP4.storage, w4a4)
    where = "target sm_90a, activation_mode w4a4"
    scales = {"layers.3.attn.wo_a": Storage.FP8_FLOAT_SCALES}
    with pytest.raises(
        UnsupportedError, match=f"{where}: 1 of .*'layers.3.attn.wo_a.weight'.*in activation_mode w4a16"
    ):
        check_target("sm_90a", config, 1, Stored(Storage.NVFP4, scales).storage, w4a4)
    shared = {"layers.4.ffn.shared_experts.w2": Storage.FP8}
    with pytest.raises(CheckpointError, match=f"{where}: matrices that are merged"):
        check_target("sm_90a", config, 1, Stored(Storage.NVFP4, shared).storage, w4a4)
    with pytest.raises(ConfigError, match=f"{where}, --tp-size 1: .*K is 1056"):
        check_target("sm_90a", replace(config, q_lora_rank=1056), 1, ALL_NVFP4.storage, w4a4)


def test_sm100_reads_what_nvidia_and_deepseek_publish():
    """Routed experts in NVFP4 or MXFP4, others in FP8, compressors in BF16; any of them for each projection."""
    config = ModelConfig.from_dict(config_json(FLASH))

    def storage(stem: str) -> Storage:
        if ".ffn.experts." in stem:
            return Storage.MXFP4 if "layers.1." in stem else Storage.NVFP4
        return Storage.PLAIN if "compressor" in stem else Storage.FP8

    for size in (1, 8):
        check_target("sm_100a", config, size, storage)
    mixed = {"layers.2.attn.wq_a": Storage.FP8, "layers.2.attn.wo_b": Storage.PLAIN}
    check_target("sm_100a", config, 1, Stored(Storage.NVFP4, mixed).storage)


@pytest.mark.parametrize("matrix", ["w1", "w2", "w3"])
def test_a_shared_expert_of_several_kinds_is_refused(matrix: str):
    config = ModelConfig.from_dict(config_json(FLASH))
    for stored, others in ((Storage.FP8, Storage.PLAIN), (Storage.NVFP4, Storage.FP8)):
        shared = {f"layers.4.ffn.shared_experts.{name}": stored for name in ("w1", "w2", "w3")}
        shared[f"layers.4.ffn.shared_experts.{matrix}"] = others
        with pytest.raises(CheckpointError, match=rf"target sm_100a.*layers\.4\.ffn\.shared_experts\.{matrix}"):
            check_target("sm_100a", config, 1, Stored(Storage.NVFP4, shared).storage)


def test_rows_of_a_matrix_that_is_merged_with_none_count_alone():
    """On SM100; on Hopper a library multiplies what is not all of one kind."""
    config = replace(ModelConfig.from_dict(config_json(FLASH)), q_lora_rank=1028)

    def storage(stem: str) -> Storage:
        return Storage.NVFP4 if ".ffn.experts." in stem or stem.endswith(".attn.wq_a") else Storage.PLAIN

    with pytest.raises(ConfigError, match="wq_a: features is 1028, expected a multiple of 8"):
        check_target("sm_100a", config, 1, storage)
    check_target("sm_90a", config, 1, storage)  # a library's GEMM


def test_sizes_that_hoppers_fp8_gemms_do_not_take_are_named():
    """Where nothing is NVFP4, too; a library's GEMM takes them."""
    config = replace(ModelConfig.from_dict(config_json(FLASH)), q_lora_rank=1024 + 32)
    with pytest.raises(ConfigError, match="target sm_90a.*wq_b.*: K is 1056, expected a multiple of 64"):
        check_target("sm_90a", config, 1, Stored(Storage.FP8).storage)
    check_target("sm_90a", config, 1, Stored(Storage.PLAIN).storage)


@pytest.mark.parametrize(
    ("change", "ranks", "message"),
    [
        (
            {"n_routed_experts": 512},
            1,
            "n_routed_experts is 512, expected at most 511; serve another model, or this one on a CPU",
        ),
        ({"moe_intermediate_size": 2048 + 16}, 1, "experts.*: features is 2064, expected a multiple of 64"),
        ({"moe_intermediate_size": 256}, 8, "--tp-size 8: .*experts.*: features is 32, expected a multiple of 64"),
        ({"hidden_size": 4096 + 16}, 1, "wq_a.*: K is 4112, expected a multiple of 64"),
        ({"q_lora_rank": 1024 + 32}, 1, "wq_b.*: K is 1056, expected a multiple of 64"),
        ({"hidden_size": 32768}, 1, "hidden_size is 32768, expected at most 16384"),
        ({"hc_mult": 2}, 8, "hc_mult is 2, expected 4"),
        ({"q_lora_rank": 32768}, 1, "q_lora_rank is 32768, expected at most 16384"),
        ({"head_dim": 256}, 1, "head_dim is 256, expected 512"),
        ({"qk_rope_head_dim": 32}, 1, "qk_rope_head_dim is 32, expected 64"),
        ({"sliding_window": 192}, 1, "sliding_window is 192, expected a power of two"),
        ({"sliding_window": 4}, 1, "sliding_window is 4, expected at least 8"),
        ({"swiglu_limit": 2.0**-11}, 1, "swiglu_limit is 0.00048828125, expected 0.000976562 to 1.15292e.18"),
        ({"rms_norm_eps": 1.5}, 1, "rms_norm_eps is 1.5, expected at most 1"),
        ({"index_head_dim": 64}, 1, "index_head_dim is 64, expected 128"),
        ({"index_n_heads": 128}, 8, "index_n_heads is 128, expected at most 64"),
        ({"index_topk": 4096}, 1, "index_topk is 4096, expected at most 2048"),
        ({"index_topk": 1040}, 1, "index_topk is 1040, expected at most 1024 for sequences of 1048576 tokens"),
    ],
)
@pytest.mark.parametrize("target", ["sm_90a", "sm_100a"])
def test_sizes_that_no_kernel_takes_are_named(change: Any, ranks: int, message: str, target: str):
    config = replace(ModelConfig.from_dict(config_json(FLASH)), **change)
    with pytest.raises(ConfigError, match=f"target {target}.*{message}"):
        check_target(target, config, ranks, ALL_NVFP4.storage)


def test_routing_limits_experts_that_are_not_nvfp4_too():
    config = replace(ModelConfig.from_dict(config_json(FLASH)), n_routed_experts=513)
    with pytest.raises(ConfigError, match="n_routed_experts is 513, expected at most 512: no kernel takes another"):
        check_target("sm_90a", config, 1, Stored(Storage.PLAIN).storage)


def test_a_shorter_context_lets_a_query_select_more():
    config = replace(ModelConfig.from_dict(config_json(FLASH)), index_topk=2048)
    with pytest.raises(ConfigError, match="at most 1820 for .* 524296 .*--context-length of at most 524288"):
        check_target("sm_90a", config, 1, ALL_NVFP4.storage, longest=524288 + 8)
    check_target("sm_90a", config, 1, ALL_NVFP4.storage, longest=524288)


def test_without_a_layer_that_has_one_the_indexer_limits_nothing():
    flash = ModelConfig.from_dict(config_json(FLASH))
    kinds = (LayerKind.HCA,) * flash.num_hidden_layers
    config = replace(flash, layer_kinds=kinds, index_head_dim=64, index_n_heads=128, index_topk=4096)
    check_target("sm_100a", config, 1, ALL_NVFP4.storage)


def test_a_cpu_takes_what_no_kernel_takes():
    config = replace(ModelConfig.from_dict(config_json(FLASH)), hc_mult=2, index_topk=4096)
    check_target("cpu", config, 1, ALL_NVFP4.storage)
