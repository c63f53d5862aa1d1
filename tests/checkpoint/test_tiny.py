"""Tiny checkpoints: deterministic, complete, and worth comparing with."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nvfp4_sgl import cli
from nvfp4_sgl.checkpoint.names import Role, tensor_specs
from nvfp4_sgl.config import LayerKind, ModelConfig
from nvfp4_sgl.errors import CheckpointError, ConfigError
from nvfp4_sgl.synthetic.tiny import write_tiny
from nvfp4_sgl.synthetic.tiny_config import TinyDraft, TinyFormat, tiny_config
from nvfp4_sgl.synthetic.tiny_folder import MARKER
from nvfp4_sgl.synthetic.tiny_weights import draw
from tests.support.dequantize import dequantize_checkpoint, raw_tensors
from tests.support.oracle import hf_logits, hf_model, load_strictly
from tests.support.prompts import FP32_MARGIN, clear_ids, draw_ids, selection_margin


def contents(directory: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in directory.iterdir()}


@pytest.mark.parametrize("format", [format.value for format in TinyFormat])
def test_same_seed_same_bytes(tiny: dict[str, Path], tmp_path: Path, format: str) -> None:
    write_tiny(tmp_path / "again", format, seed=3)
    assert contents(tmp_path / "again") == contents(tiny[format])


def test_a_configuration_is_the_callers_own() -> None:
    """What transformers adds to its fields is in no other."""
    config = tiny_config(TinyFormat.NVFP4_FULL, {}, draft=TinyDraft.DSPARK)
    before = json.dumps(config)
    config["rope_scaling"]["rope_type"] = "yarn"
    config["dspark_target_layer_ids"].append(9)
    config["quantization_config"]["ignore"].clear()
    assert json.dumps(tiny_config(TinyFormat.NVFP4_FULL, {}, draft=TinyDraft.DSPARK)) == before


def test_another_seed_changes_every_weight(tmp_path: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    write_tiny(a, "bf16", seed=0, num_hidden_layers=3)
    write_tiny(b, "bf16", seed=1, num_hidden_layers=3)
    first, second = raw_tensors(a), raw_tensors(b)
    assert first.keys() == second.keys()
    assert not [name for name in first if np.array_equal(first[name][1], second[name][1])]


def test_formats_share_their_weights(tiny: dict[str, Path]) -> None:
    """Unquantised tensors are equal in all formats; quantised ones stand for the bf16 ones."""
    plain = dequantize_checkpoint(tiny["bf16"])
    for format in ("nvfp4-full", "nvfp4-experts"):
        raw = raw_tensors(tiny[format])
        for name, values in dequantize_checkpoint(tiny[format]).items():
            dtype = raw[name][0]
            error = np.sqrt(np.mean((values - plain[name]).astype(np.float64) ** 2) / np.mean(plain[name] ** 2.0))
            if dtype == "U8":
                # Gaussian weights lose 9.5 % rms; outliers and generous global scales a little more or less.
                assert 0.07 < error < 0.13, (name, error)
            elif dtype == "F8_E4M3":
                assert 0.01 < error < 0.04, (name, error)
            else:
                assert error == 0, (name, dtype)


def test_matrices_have_outliers(tiny: dict[str, Path]) -> None:
    """Within a block of 16, a good share of blocks is dominated by one element."""
    w = dequantize_checkpoint(tiny["bf16"])["layers.1.attn.wq_b.weight"]
    blocks = np.sort(np.abs(w.reshape(-1, 16)), axis=1)
    share = np.mean(blocks[:, -1] > 3 * blocks[:, -2])
    assert 0.005 < share < 0.03


def test_gate_and_up_scales_are_tied_in_some_experts_and_free_in_others(tiny: dict[str, Path]) -> None:
    for format in ("nvfp4-full", "nvfp4-experts"):
        raw = raw_tensors(tiny[format])
        ratios = {
            stem: float(raw[f"{stem}.w3.weight_scale_2"][1] / raw[f"{stem}.w1.weight_scale_2"][1])
            for name in raw
            if name.endswith("w1.weight_scale_2") and not name.startswith("mtp.")
            for stem in [name.removesuffix(".w1.weight_scale_2")]
        }
        untied = {stem: math.log2(ratio) for stem, ratio in ratios.items() if ratio != 1}
        assert 20 <= len(untied) < len(ratios)
        assert all(abs(x - round(x)) > 1e-3 for x in untied.values()), "a power of two would hide mistakes"
        assert max(abs(x) for x in untied.values()) > 0.3
        shared = [stem for stem in untied if stem.endswith("shared_experts")]
        assert len(shared) == (2 if format == "nvfp4-full" else 0)


def test_config_exercises_everything(tiny: dict[str, Path]) -> None:
    config = ModelConfig.from_dir(tiny["nvfp4-full"])
    assert set(config.layer_kinds) == set(LayerKind)
    assert 0 < config.num_hash_layers < config.num_hidden_layers
    assert config.index_n_heads >= 16 and config.head_dim == 512 and config.qk_rope_head_dim == 64
    kinds = {spec.role for spec in tensor_specs(config).values()}
    assert kinds == set(Role)


def test_transformers_reads_the_bf16_format_itself(tiny: dict[str, Path]) -> None:
    """Names, shapes and config are the release's: nothing of ours is needed to load them."""
    theirs = load_strictly(tiny["bf16"])
    ours = hf_model(tiny["bf16"])
    state, other = theirs.state_dict(), ours.state_dict()
    assert state.keys() == other.keys()
    assert all(torch.equal(state[name], other[name]) for name in state)
    kinds = ["sliding_attention", *["compressed_sparse_attention", "heavily_compressed_attention"] * 2]
    assert theirs.config.layer_types == kinds
    assert theirs.config.mlp_layer_types == ["hash_moe"] * 2 + ["moe"] * 3


@pytest.mark.parametrize("format", ["nvfp4-full", "nvfp4-experts", "bf16"])
def test_next_token_distributions_are_peaked_and_depend_on_the_context(tiny: dict[str, Path], format: str) -> None:
    model = hf_model(tiny[format])
    logits = torch.cat([hf_logits(model, draw_ids(200, seed, 512)) for seed in range(3)])
    assert bool(logits.isfinite().all())
    top = logits.softmax(-1).max(-1)
    assert top.values.median() > 0.45
    assert top.indices.unique().numel() > 150
    # The last 20 tokens are the same, what comes before is not: another prediction in most places.
    tail = draw_ids(20, 99, 512)
    one, two = (hf_logits(model, draw_ids(150, seed, 512) + tail)[-20:].argmax(-1) for seed in (5, 6))
    assert (one != two).float().mean() > 0.5


def test_the_swiglu_clamp_is_active_in_a_few_percent(tiny: dict[str, Path]) -> None:
    model = hf_model(tiny["nvfp4-full"])
    shares = []

    def record(module: torch.nn.Module, inputs: tuple, output: torch.Tensor) -> None:
        shares.append((output.abs() > model.config.swiglu_limit).float().mean().item())

    for name, module in model.named_modules():
        if name.endswith("shared_experts.up_proj"):
            module.register_forward_hook(record)
    hf_logits(model, draw_ids(200, 1, 512))
    assert len(shares) == 5 and all(0.02 < share < 0.1 for share in shares)


def test_prompts_keep_clear_of_ties(tiny: dict[str, Path]) -> None:
    model = hf_model(tiny["nvfp4-full"])
    ids = clear_ids(model, 300, seed=2)
    assert len(ids) == 300 and min(ids) >= 25
    assert selection_margin(model, ids) >= FP32_MARGIN
    # The margin is that of the scores: a router whose rows are all equal has none.
    with torch.no_grad():
        model.model.layers[3].mlp.gate.weight.zero_()
        model.model.layers[3].mlp.gate.e_score_correction_bias.zero_()
    assert selection_margin(model, ids) == 0


def test_draws_depend_on_name_and_seed_alone() -> None:
    config = ModelConfig.from_dict(_config())
    specs = list(tensor_specs(config).values())
    matrix = next(spec for spec in specs if spec.name == "layers.1.attn.wq_b")
    first = draw(matrix, 5, experts=16)
    for spec in specs[:20]:
        draw(spec, 5, experts=16)
    assert torch.equal(first, draw(matrix, 5, experts=16))
    twin = next(spec for spec in specs if spec.name == "layers.3.attn.wq_b")
    assert not torch.equal(first, draw(twin, 5, experts=16))
    table = draw(next(spec for spec in specs if spec.role is Role.TID2EID), 5, experts=16)
    assert all(len(set(row)) == 6 for row in table.tolist()) and set(table.flatten().tolist()) == set(range(16))


def _config() -> dict:
    from nvfp4_sgl.synthetic.tiny_config import TinyFormat, tiny_config

    return tiny_config(TinyFormat.BF16, {})


class TestCommand:
    """``nvfp4-sgl tiny`` and ``nvfp4-sgl inspect``."""

    def test_write_and_inspect(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        directory = tmp_path / "new" / "tiny"
        options = ["--set", "num_hidden_layers=3", "--set", "index_topk=512", "--set", "num_nextn_predict_layers=0"]
        assert cli.main(["tiny", str(directory), "--format", "nvfp4-experts", "--seed", "4", *options]) == 0
        assert "nvfp4-experts, seed 4" in capsys.readouterr().out
        config = ModelConfig.from_dir(directory)
        assert (config.num_hidden_layers, config.index_topk, config.num_nextn_predict_layers) == (3, 512, 0)
        assert config.layer_kinds == (LayerKind.SWA, LayerKind.CSA, LayerKind.HCA)
        assert not [name for name in raw_tensors(directory) if name.startswith("mtp.")]
        assert cli.main(["inspect", str(directory)]) == 0
        out = capsys.readouterr().out
        assert "complete" in out and "expert linear" in out and "NVFP4" in out
        next(directory.glob("*.safetensors")).unlink()
        assert cli.main(["inspect", str(directory)]) == 2
        assert "absent" in capsys.readouterr().err

    def test_nothing_else_is_ever_overwritten(self, tmp_path: Path) -> None:
        (tmp_path / "thesis.safetensors").write_text("precious")
        for force in (False, True):
            with pytest.raises(CheckpointError, match="not empty|only a tiny checkpoint .*; name an empty directory"):
                write_tiny(tmp_path, "bf16", force=force)
        assert contents(tmp_path) == {"thesis.safetensors": b"precious"}

    def test_force_replaces_a_tiny_checkpoint(self, tmp_path: Path) -> None:
        write_tiny(tmp_path, "bf16", shards=4, num_hidden_layers=3)
        with pytest.raises(CheckpointError, match="--force"):
            write_tiny(tmp_path, "nvfp4-full", num_hidden_layers=3)
        write_tiny(tmp_path, "nvfp4-full", force=True, num_hidden_layers=3)
        assert len(list(tmp_path.glob("*.safetensors"))) == 3 and (tmp_path / MARKER).is_file()

    def test_unknown_fields_and_impossible_values(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="unknown field 'indextopk'"):
            write_tiny(tmp_path / "a", "bf16", indextopk=3)
        with pytest.raises(ConfigError, match="o_groups"):
            write_tiny(tmp_path / "a", "bf16", o_groups=3)
        impossible: dict[str, Any] = {"num_hidden_layers": None, "num_nextn_predict_layers": "1", "compress_ratios": 7}
        for field, value in impossible.items():
            with pytest.raises(ConfigError, match=f"field '{field}': expected .*, found {value!r}"):
                write_tiny(tmp_path / "a", "bf16", **{field: value})
        with pytest.raises(ConfigError, match="field 'num_hidden_layers': expected an integer from 1 to 1024"):
            write_tiny(tmp_path / "a", "bf16", num_hidden_layers=10**15)
        assert not (tmp_path / "a").exists()
