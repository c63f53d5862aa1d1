"""Files that are no checkpoint, or a trap: each ends in one clear error, soon, and without much memory."""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nvfp4_sgl import cli
from nvfp4_sgl.checkpoint.verified import verify
from nvfp4_sgl.errors import CheckpointError, ConfigError, Nvfp4SglError
from nvfp4_sgl.files import (
    escaped,
    foreign_kind,
    parse_json,
    refuse_hub_cache,
    refuse_lost,
    require_directory,
    shown,
)
from tests.support.damage import INDEX, change_json, copy_checkpoint, replace_bytes

SECONDS = 20
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"


@pytest.fixture
def damaged(tiny: dict[str, Path], tmp_path: Path) -> Path:
    return copy_checkpoint(tiny["nvfp4-full"], tmp_path / "damaged")


def refused(directory: Path, *mentions: str) -> str:
    """The message of the error that :func:`verify` raises, soon, and which is one of ours."""
    started = time.monotonic()
    with pytest.raises(Nvfp4SglError) as caught:
        verify(directory)
    assert time.monotonic() - started < SECONDS
    message = str(caught.value)
    for mention in mentions:
        assert mention in message, message
    assert len(message) < 3000, len(message)
    return message


CONFIGS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "null draft layers": ({"num_nextn_predict_layers": None}, ("num_nextn_predict_layers", "integer", "None")),
    "string of draft layers": ({"num_nextn_predict_layers": "1"}, ("num_nextn_predict_layers", "'1'")),
    "huge number of draft layers": ({"num_nextn_predict_layers": 10**400}, ("num_nextn_predict_layers", "401 char")),
    "negative draft layers": ({"num_nextn_predict_layers": -1}, ("num_nextn_predict_layers", "-1")),
    "architectures is a number": ({"architectures": 5}, ("architectures", "found 5")),
    "another architecture": ({"architectures": ["LlamaForCausalLM"]}, ("architectures", "LlamaForCausalLM")),
    "a hundred million experts": ({"n_routed_experts": 10**8}, ("n_routed_experts", "4096")),
    "four thousand experts": ({"n_routed_experts": 4000}, ("4000 experts", "tensors")),
    "huge dimension": ({"hidden_size": 10**400}, ("hidden_size", "an integer from 1 to")),
    "huge number": ({"swiglu_limit": 10**400}, ("swiglu_limit", "65536", "401 char")),
    "number beyond fp32": ({"rope_theta": 1e300}, ("rope_theta", "1e+12", "1e+300")),
    "dimension is a string": ({"head_dim": "512"}, ("head_dim", "'512'")),
    "ratios are strings": ({"compress_ratios": ["4", "4"]}, ("compress_ratios",)),
    "million layers": ({"num_hidden_layers": 10**6}, ("num_hidden_layers", "1024")),
    "quantization_config is a list": ({"quantization_config": []}, ("quantization_config", "object")),
    "unknown word": (
        {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4", "pre_quant_scale": True}},
        ("quantization_config.pre_quant_scale", "one of the fields"),
    ),
    "algorithm is a list": (
        {"quantization_config": {"quant_method": "modelopt", "quant_algo": ["NVFP4"]}},
        ("quant_algo", "['NVFP4']"),
    ),
    "cache in NVFP4": (
        {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4", "kv_cache_quant_algo": "NVFP4"}},
        ("kv_cache_quant_algo", "FP8"),
    ),
    "quantized_layers of nothing": (
        {
            "quantization_config": {
                "quant_method": "modelopt",
                "quant_algo": "MIXED_PRECISION",
                "quantized_layers": {"layers.99": {"quant_algo": "NVFP4"}},
            }
        },
        ("quantized_layers.layers.99", "name of a matrix"),
    ),
    "quantized_layers that contradict the tensors": (
        {
            "quantization_config": {
                "quant_method": "modelopt",
                "quant_algo": "MIXED_PRECISION",
                "quantized_layers": {"layers.1.attn.wq_b": {"quant_algo": "FP8"}},
            }
        },
        ("quantized_layers.layers.1.attn.wq_b", "NVFP4"),
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_config(damaged: Path, name: str) -> None:
    changes, mentions = CONFIGS[name]
    change_json(damaged / "config.json", lambda config: config.update(changes))
    refused(damaged, "config.json", *mentions)


TEXTS: dict[str, tuple[bytes, tuple[str, ...]]] = {
    "deep": (b"[" * 200_000, ("nested too deeply", "fetch it again, or correct it")),
    "deep in an object": (b'{"a":' * 100_000, ("nested too deeply",)),
    "number of 5000 digits": (b'{"hidden_size": ' + b"9" * 5000 + b"}", ("not valid JSON",)),
    "NaN": (b'{"swiglu_limit": NaN}', ("NaN",)),
    "field twice": (b'{"weight_map": {}, "hidden_size": 1, "hidden_size": 2}', ("there twice: 'hidden_size'",)),
    "field twice, deep inside": (b'{"a": [{"b": {"c": 1, "c": 1}}]}', ("there twice: 'c'",)),
    "long field twice": (b'{"%s": 1, "%s": 2}' % (b"x" * 10**6, b"x" * 10**6), ("there twice",)),
    "no UTF-8": (b'{"a": "\xff"}', ("not valid JSON",)),
    "empty": (b"", ("not valid JSON", "fetch it again, or correct it")),
    "git-lfs pointer": (LFS, ("git-lfs pointer", "git lfs pull")),
    "web page": (b"<!DOCTYPE html><html>404</html>", ("web page", "fetch")),
    "list": (b"[1, 2]", ("object",)),
}


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("file", ["config.json", INDEX])
def test_json(damaged: Path, name: str, file: str) -> None:
    text, mentions = TEXTS[name]
    if file == INDEX and name == "NaN":
        text = b'{"weight_map": NaN}'
    if file == INDEX and name in ("list", "number of 5000 digits"):
        mentions = ("weight_map",) if name == "list" else mentions
    replace_bytes(damaged / file, text)
    refused(damaged, file, *mentions)


HEADERS: dict[str, tuple[bytes, tuple[str, ...]]] = {
    "git-lfs pointer": (LFS, ("git-lfs pointer", "git lfs pull")),
    "web page": (b"\n<html><body>Access denied</body></html>" * 20, ("web page",)),
    "pickle": (b"\x80\x02}q\x00(X\x05\x00\x00\x00model" * 10, ("pickle", "only safetensors")),
    "zipped pickle": (b"PK\x03\x04" + bytes(100), ("pickle",)),
    "GGUF": (b"GGUF\x03\x00\x00\x00" + bytes(100), ("GGUF",)),
    "gzip": (b"\x1f\x8b\x08" + bytes(100), ("compressed",)),
    "deep header": ((100_000).to_bytes(8, "little") + b"[" * 100_000, ("header", "nested too deeply")),
}


def one_entry(shape: object, offsets: object = (0, 4), name: str = "x") -> bytes:
    return json.dumps({name: {"dtype": "BF16", "shape": shape, "data_offsets": offsets}}).encode()


ENTRIES: dict[str, tuple[bytes, tuple[str, ...]]] = {
    "sizes of 300 digits": (one_entry([10**300, 10**300]), ("'x'", "shape of at most 8", "characters")),
    "400 sizes of 20,000": (one_entry([20_000] * 400), ("'x'", "shape of at most 8", "characters")),
    "100 sizes of 50 digits": (one_entry([10**50] * 100), ("'x'", "shape of at most 8", "characters")),
    "a hundred thousand dimensions": (one_entry([1] * 10**5, (0, 2)), ("'x'", "shape of at most 8", "characters")),
    "sizes that no disk holds": (one_entry([2**40] * 8), ("'x'", "takes", "data_offsets [0, 4] hold 4")),
    "a size that is true": (one_entry([True, 2]), ("'x'", "integers")),
    "offsets of 4000 digits": (one_entry([2], (0, 10**4000)), ("'x'", "data_offsets from 0 to", "characters")),
    "offsets below zero": (one_entry([2], (-(10**4299), 4)), ("'x'", "data_offsets from 0 to", "characters")),
    "offsets backwards": (one_entry([0], (4, 0)), ("'x'", "data_offsets from 0 to", "[4, 0]")),
    "offsets that are words": (one_entry([2], ("0", "4")), ("'x'", "expected dtype, shape and data_offsets")),
    "a name of a million characters": (one_entry([2], name="x" * 10**6), ("at most 256 characters", "characters)")),
    "a shape twice": (
        b'{"x": {"dtype": "BF16", "shape": [1], "shape": [2], "data_offsets": [0, 4]}}',
        ("header", "there twice: 'shape'"),
    ),
    "a tensor twice": (
        b'{"x": {"dtype": "BF16", "shape": [2], "data_offsets": [0, 4]},'
        b' "x": {"dtype": "BF16", "shape": [2], "data_offsets": [0, 4]}}',
        ("header", "there twice: 'x'"),
    ),
}


@pytest.mark.parametrize("name", HEADERS)
def test_weights(damaged: Path, name: str) -> None:
    data, mentions = HEADERS[name]
    file = sorted(damaged.glob("*.safetensors"))[1]
    replace_bytes(file, data)
    refused(damaged, file.name, *mentions)


@pytest.mark.parametrize("name", ENTRIES)
def test_an_entry_of_a_header(damaged: Path, name: str) -> None:
    text, mentions = ENTRIES[name]
    file = sorted(damaged.glob("*.safetensors"))[1]
    replace_bytes(file, len(text).to_bytes(8, "little") + text + bytes(4))
    refused(damaged, file.name, *mentions)


@pytest.mark.parametrize(
    "entries", [{"x" * 10**6: "model.safetensors"}, {"x": "y" * 10**6 + ".safetensors"}, {"x": "../y.safetensors"}]
)
def test_an_index_of_names_that_no_file_has(damaged: Path, entries: dict[str, str]) -> None:
    replace_bytes(damaged / INDEX, json.dumps({"weight_map": entries}).encode())
    refused(damaged, INDEX, "expected", "found")


def test_no_message_grows_with_a_file() -> None:
    """Whatever quotes a file, and however."""
    assert len(str(CheckpointError("x" * 10**6))) < 17_000 and str(ConfigError("short")) == "short"
    assert "int that is too long to print" in shown(10**5000)
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    assert "too long to print" in shown(deep)


@pytest.mark.parametrize("name", ["config.json", INDEX, "model-00002-of-00003.safetensors"])
@pytest.mark.parametrize("what", ["named pipe", "loop of links", "broken link", "directory"])
def test_what_is_no_file(damaged: Path, name: str, what: str) -> None:
    """A pipe nobody writes to would be waited for."""
    file = damaged / name
    file.unlink()
    make: dict[str, Callable[[], object]] = {
        "named pipe": lambda: os.mkfifo(file),
        "loop of links": lambda: file.symlink_to(file.name),
        "broken link": lambda: file.symlink_to("nowhere"),
        "directory": file.mkdir,
    }
    make[what]()
    expected = {"named pipe": "named pipe", "loop of links": "links", "broken link": "leads nowhere"}
    refused(damaged, name, expected.get(what, "directory"))


def test_a_file_and_a_hub_id_say_what_to_do(tiny: dict[str, Path], tmp_path: Path, monkeypatch: Any) -> None:
    directory = tiny["nvfp4-full"]
    refused(directory / "config.json", "found a file", f"name the directory that holds it, {directory}")
    refused(tmp_path / "absent", "found nothing")
    monkeypatch.chdir(tmp_path)
    refused(Path("deepseek-ai/DeepSeek-V4-Flash"), "hf download deepseek-ai/DeepSeek-V4-Flash --local-dir")


def test_control_characters_are_spelt_out(damaged: Path) -> None:
    change_json(damaged / "config.json", lambda config: config.update(scoring_func="\x1b[2J\u202egone"))
    message = escaped(refused(damaged, "scoring_func"))
    assert "\x1b" not in message and "\u202e" not in message
    assert escaped("a\x1b[31m\x00\n\tü") == "a\\x1b[31m\\x00\n\tü"
    command = [sys.executable, "-m", "nvfp4_sgl.cli", "inspect", str(damaged / "no\x1b[2Jsuch")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and "\x1b" not in done.stderr and "\\x1b" in done.stderr


VARIANTS: dict[str, Callable[[dict[str, Any]], object]] = {
    "one ratio more and no number of draft layers": lambda c: c.pop("num_nextn_predict_layers"),
    "three draft layers and one ratio for them": lambda c: c.update(num_nextn_predict_layers=3),
    "no ratio for draft layers": lambda c: c.update(compress_ratios=c["compress_ratios"][:-1]),
    "a second architecture": lambda c: c["architectures"].append("DeepseekV4ForCausalLMNextN"),
    "producer": lambda c: c["quantization_config"].update(producer={"name": "modelopt", "version": "0.47.0"}),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_variants_that_load(damaged: Path, name: str) -> None:
    plain = verify(damaged)
    assert len(plain.raw["compress_ratios"]) == plain.config.num_hidden_layers + 1
    change_json(damaged / "config.json", VARIANTS[name])
    assert verify(damaged).config.layer_kinds == plain.config.layer_kinds


def test_json_of_a_file_is_what_it_says() -> None:
    assert parse_json(b'{"a": [1, 2.5, null]}', "x", ConfigError, "fetch it") == {"a": [1, 2.5, None]}
    assert foreign_kind(b"\x10\x00\x00\x00\x00\x00\x00\x00{}") is None
    with pytest.raises(CheckpointError, match=r"x: not valid JSON \(.*\); fetch it"):
        parse_json(b"{", "x", CheckpointError, "fetch it")


@pytest.mark.parametrize("given", ["", "snapshots", "blobs"])
@pytest.mark.parametrize("command", ["inspect", "doctor", "verify", "convert", "build", "layertest"])
def test_a_folder_of_the_hub_s_cache_leads_to_its_snapshots(
    command: str, given: str, tiny: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "models--org--name"
    (root / "refs").mkdir(parents=True)
    (root / "blobs").mkdir()
    (root / "refs" / "main").write_text("beef")
    for revision in ("beef", "1dea"):
        copy_checkpoint(tiny["nvfp4-full"], root / "snapshots" / revision)
    more = {"convert": [str(tmp_path / "out")], "build": ["--target", "sm_100a"], "layertest": ["--layer", "0"]}
    assert cli.main([command, str(root / given), *more.get(command, [])]) == 2
    told = "".join(capsys.readouterr())
    expected = f"pass its snapshot {root / 'snapshots' / 'beef'} or {root / 'snapshots' / '1dea'}"
    assert "found a model's folder in the Hugging Face cache" in told and expected in told


@pytest.mark.parametrize("given", ["", "hub"])
def test_the_cache_itself_leads_to_snapshots(given: str, tmp_path: Path) -> None:
    for model in ("org--name", "org--other"):
        (tmp_path / "hub" / f"models--{model}" / "snapshots" / "beef").mkdir(parents=True)
    first = tmp_path / "hub" / "models--org--name" / "snapshots" / "beef"
    message = f"found the Hugging Face cache; pass one of {tmp_path / 'hub' / 'models--*/snapshots/*'}, such as {first}"
    with pytest.raises(ConfigError, match=re.escape(message)):
        require_directory(tmp_path / given, ConfigError)


def test_a_server_is_told_so_before_it_starts(tmp_path: Path) -> None:
    (tmp_path / "models--org--name" / "snapshots").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"Hugging Face cache without a snapshot; fetch the model again"):
        refuse_hub_cache(tmp_path / "models--org--name", ConfigError)


def test_links_in_a_circle_are_no_hub_cache(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "link")
    refuse_hub_cache(tmp_path / "link", ConfigError)


def test_files_that_went_away(tmp_path: Path) -> None:
    """They are named if the checkpoint had them; other errors of the system are not its fault."""
    weights = tmp_path / "model.safetensors"
    absent = FileNotFoundError(errno.ENOENT, "No such file or directory", str(weights))
    with pytest.raises(CheckpointError, match=f"^{tmp_path}: was there when the server started"):
        refuse_lost(tmp_path, OSError("Repo id must be in the form"))
    (tmp_path / "config.json").touch()
    with pytest.raises(CheckpointError, match=f"^{weights}: was there when the server started"):
        refuse_lost(tmp_path, absent)
    weights.touch()
    for other in (absent, OSError(errno.EADDRINUSE, "Address already in use"), FileNotFoundError(2, "", "/elsewhere")):
        refuse_lost(tmp_path, other)


@pytest.mark.parametrize("given", [".", "link", "snapshots/.."])
def test_such_a_folder_is_known_by_any_path(given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "models--org--name"
    (root / "snapshots" / "beef").mkdir(parents=True)
    (root / "link").symlink_to(root)
    monkeypatch.chdir(root)
    with pytest.raises(ConfigError, match=re.escape(f"pass its snapshot {root / 'snapshots' / 'beef'}")):
        refuse_hub_cache(Path(given), ConfigError)
