"""What cannot be served stops the launcher: exit code not 0, one clear error, no worker started."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.serving.test_flags import resolved
from tests.support.full import but_for
from tests.support.oracle import hf_model
from tests.support.start_ups import StartUps

MATRIX = "layers.1.ffn.experts.3.w1"


def edit_config(path: Path, **fields: Any) -> None:
    """Set fields of config.json; ``None`` removes one."""
    file = path / "config.json"
    config = json.loads(file.read_text()) | fields
    file.write_text(json.dumps({name: value for name, value in config.items() if value is not None}))


def edit_quantization(path: Path, **fields: Any) -> None:
    config = json.loads((path / "config.json").read_text())
    edit_config(path, quantization_config=config["quantization_config"] | fields)


def shard_of(path: Path, name: str) -> Path:
    weight_map = json.loads((path / "model.safetensors.index.json").read_text())["weight_map"]
    return path / weight_map[name]


def edit_tensors(path: Path, name: str, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Change the tensors of the shard that holds ``name``."""
    shard = shard_of(path, name)
    tensors = {key: tensor.clone() for key, tensor in load_file(shard).items()}
    change(tensors)
    save_file(tensors, shard)


def edit_index(path: Path, change: Callable[[dict[str, str]], object]) -> None:
    file = path / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    change(index["weight_map"])
    file.write_text(json.dumps(index))


def remove_tensor(path: Path) -> None:
    edit_tensors(path, f"{MATRIX}.weight_scale", lambda tensors: tensors.pop(f"{MATRIX}.weight_scale"))
    edit_index(path, lambda weight_map: weight_map.pop(f"{MATRIX}.weight_scale"))


def add_tensor(path: Path) -> None:
    shard = shard_of(path, f"{MATRIX}.weight")
    edit_tensors(path, f"{MATRIX}.weight", lambda tensors: tensors.update({"layers.0.surprise": torch.zeros(4)}))
    edit_index(path, lambda weight_map: weight_map.update({"layers.0.surprise": shard.name}))


def replace(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        edit_tensors(path, name, lambda tensors: tensors.update({name: change(tensors[name])}))

    return damage


def truncate(path: Path) -> None:
    shard = shard_of(path, f"{MATRIX}.weight")
    shard.write_bytes(shard.read_bytes()[:-100])


def save_as_transformers(path: Path) -> None:
    """Replace the checkpoint by what transformers saves of it: no compress_ratios, other field and tensor names."""
    model = hf_model(path)
    for file in path.glob("*.safetensors*"):
        file.unlink()
    model.save_pretrained(path)


def cut_tokenizer(path: Path) -> None:
    file = path / "tokenizer.json"
    file.write_bytes(file.read_bytes()[:-100])


def pipe_tokenizer(path: Path) -> None:
    (path / "tokenizer.json").unlink()
    os.mkfifo(path / "tokenizer.json")


def default_nan(path: Path) -> None:
    (path / "generation_config.json").write_text('{"temperature": NaN}')


DAMAGES: dict[str, tuple[Callable[[Path], None], tuple[str, ...]]] = {
    "missing tensor": (remove_tensor, (f"{MATRIX}.weight_scale",)),
    "extra tensor": (add_tensor, ("layers.0.surprise",)),
    "wrong shape": (replace("layers.1.attn.wkv.weight", lambda tensor: tensor[:-1]), ("layers.1.attn.wkv.weight",)),
    "wrong dtype": (replace("layers.1.attn_norm.weight", torch.Tensor.half), ("layers.1.attn_norm.weight", "F16")),
    "truncated file": (truncate, (".safetensors", "bytes")),
    "absent shard": (lambda path: shard_of(path, f"{MATRIX}.weight").unlink(), (".safetensors",)),
    "config without compress_ratios": (lambda path: edit_config(path, compress_ratios=None), ("compress_ratios",)),
    "unknown quant_algo": (lambda path: edit_quantization(path, quant_algo="NVFP3"), ("quant_algo", "NVFP3")),
    "directory saved by transformers": (save_as_transformers, ("compress_ratios", "save_pretrained")),
    "cut tokenizer": (cut_tokenizer, ("tokenizer.json", "not valid JSON")),
    "pipe in place of a tokenizer": (pipe_tokenizer, ("tokenizer.json", "found a named pipe")),
    "default that is no number": (default_nan, ("generation_config.json", "NaN")),
    "unknown activation mode": (lambda path: edit_config(path, activation_mode="w2a2"), ("activation_mode", "w2a2")),
}

FLAGS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "quantization": (("--quantization", "modelopt_fp4"), ("--quantization modelopt_fp4",)),
    "attention backend": (("--attention-backend", "triton"), ("--attention-backend triton", "nvfp4_sgl")),
    "stock attention backend": (("--attention-backend", "dsv4"), ("--attention-backend dsv4",)),
    "decode backend": (("--decode-attention-backend", "triton"), ("--decode-attention-backend triton",)),
    "dtype": (("--dtype", "float16"), ("--dtype float16",)),
    "cache dtype": (("--kv-cache-dtype", "fp8_e5m2"), ("--kv-cache-dtype fp8_e5m2",)),
    "page size": (("--page-size", "64"), ("--page-size 64",)),
    "other weights": (("--load-format", "pt"), ("--load-format pt", "safetensors", "dummy")),
    "other implementation": (("--model-impl", "transformers"), ("--model-impl transformers",)),
    "other reasoning": (("--reasoning-parser", "deepseek-r1"), ("--reasoning-parser deepseek-r1", "deepseek-v4")),
    "other tool calls": (("--tool-call-parser", "deepseekv32"), ("--tool-call-parser deepseekv32", "deepseekv4")),
    "chat template": (("--chat-template", "chatml"), ("--chat-template chatml", "leave the flag out")),
    "drafts of another kind": (
        ("--speculative-algorithm", "DSPARK"),
        ("--speculative-algorithm DSPARK", "found an MTP draft", "use EAGLE or NEXTN"),
    ),
    "too many guesses": (
        ("--speculative-algorithm", "EAGLE", "--speculative-num-steps", "10"),
        ("--speculative-num-steps 10", "expected 1 to 9"),
    ),
    "pipeline": (("--pp-size", "2"), ("--pp-size 2",)),
    "experts": (("--ep-size", "2", "--tp-size", "2"), ("--ep-size 2",)),
    "attention data parallelism": (("--attn-dp-size", "2", "--tp-size", "2"), ("--attn-dp-size 2",)),
    "lora": (("--enable-lora",), ("--enable-lora",)),
    "disaggregation": (("--disaggregation-mode", "prefill"), ("--disaggregation-mode prefill",)),
    "hidden states": (("--return-hidden-states-mode", "full"), ("--return-hidden-states-mode full",)),
    "offload": (("--cpu-offload-gb", "1"), ("--cpu-offload-gb 1",)),
    "tensor parallelism that does not divide": (("--tp-size", "3"), ("--tp-size 3", "o_groups")),
    "unknown activation mode": (
        ("--json-model-override-args", '{"activation_mode": "w2a2"}'),
        ("--json-model-override-args", "w2a2"),
    ),
    "unknown class to convert": (
        ("--json-model-override-args", '{"convert_at_load": "experts,biases"}'),
        ("convert_at_load", "expected all, or classes among experts", "'biases'"),
    ),
    "nothing to convert": (
        ("--json-model-override-args", '{"convert_at_load": "all"}'),
        ("convert_at_load", "not NVFP4", "leave it out"),
    ),
    "override of the architecture": (
        ("--json-model-override-args", '{"num_hidden_layers": 2}'),
        ("num_hidden_layers",),
    ),
    "override that is not JSON": (("--json-model-override-args", "{"), ("--json-model-override-args", "JSON")),
}


def assert_one_error(code: int | None, output: str, expected: tuple[str, ...]) -> None:
    """Exit code not 0; exactly one message of ours, which says what is expected of it; no traceback."""
    assert code not in (0, None), output
    errors = [line for line in output.splitlines() if "nvfp4-sgl: error:" in line]
    assert len(errors) == 1, output
    message = output[output.index("nvfp4-sgl: error:") :]
    for text in expected:
        assert text in message, message
    assert "Traceback" not in output, output


OURS = ("CheckpointError", "ConfigError", "UnsupportedError")
"""Errors of which a launcher prints the message alone."""


def assert_refused(error: str | None, expected: tuple[str, ...]) -> None:
    """What :func:`resolved` tells is an error of this package with these words."""
    assert error is not None and error.partition(":")[0] in OURS, error
    for text in expected:
        assert text in error, error


SOME_DAMAGES = ("missing tensor", "truncated file", "directory saved by transformers", "pipe in place of a tokenizer")
"""Those that CI starts a server with."""


@pytest.mark.server
@pytest.mark.parametrize("damage", but_for(DAMAGES, *(damage for damage in DAMAGES if damage not in SOME_DAMAGES)))
def test_damaged_checkpoint(damage: str, damaged: Path, start_up: StartUps) -> None:
    change, expected = DAMAGES[damage]
    change(damaged)
    assert_one_error(*start_up(damaged), expected)


def test_every_damaged_checkpoint(tiny_checkpoints: Callable[[str], Path], tmp_path: Path) -> None:
    """Resolved in one process, as a launcher does."""
    lines = []
    for damage, (change, _) in DAMAGES.items():
        path = tmp_path / damage
        shutil.copytree(tiny_checkpoints("nvfp4-full"), path)
        change(path)
        lines.append(["--model-path", str(path)])
    for error, (_, expected) in zip(resolved(lines, tmp_path), DAMAGES.values(), strict=True):
        assert_refused(error, expected)


STARTED = ("quantization", "too many guesses", "tensor parallelism that does not divide", "override that is not JSON")
"""Flags that CI starts a server with: what is found before SGLang resolves its arguments, and after that."""


@pytest.mark.server
@pytest.mark.parametrize("flag", but_for(FLAGS, *(flag for flag in FLAGS if flag not in STARTED)))
def test_contradicting_or_unsupported_flag(
    flag: str, tiny_checkpoints: Callable[[str], Path], start_up: StartUps
) -> None:
    arguments, expected = FLAGS[flag]
    assert_one_error(*start_up(tiny_checkpoints("nvfp4-full"), *arguments), expected)


def test_every_contradicting_or_unsupported_flag(tiny_checkpoints: Callable[[str], Path], tmp_path: Path) -> None:
    """Resolved in one process, as a launcher does: each is an error of this package, which says what is expected."""
    model = ["--model-path", str(tiny_checkpoints("nvfp4-full"))]
    found = resolved([[*model, *arguments] for arguments, _ in FLAGS.values()], tmp_path)
    for error, (_, expected) in zip(found, FLAGS.values(), strict=True):
        assert_refused(error, expected)


@pytest.mark.server
def test_a_directory_that_is_not_there(start_up: StartUps, tmp_path: Path) -> None:
    assert_one_error(*start_up(tmp_path / "missing"), (f"--model-path {tmp_path / 'missing'}", "no such directory"))


@pytest.mark.server
def test_unsupported_sglang_version(
    tiny_checkpoints: Callable[[str], Path], start_up: StartUps, tmp_path: Path
) -> None:
    """Another version's metadata, found before the installed one's."""
    shutil.rmtree(tmp_path / "sglang-0.5.24.dist-info", ignore_errors=True)
    (tmp_path / "sglang-0.5.24.dist-info").mkdir()
    (tmp_path / "sglang-0.5.24.dist-info" / "METADATA").write_text("Name: sglang\nVersion: 0.5.24\n")
    code, output = start_up(tiny_checkpoints("nvfp4-full"), directory=tmp_path)
    assert_one_error(code, output, ("0.5.23", "0.5.24", "pip install"))
