"""Files beside the weights: what stops the server is one error of every command and of the pre-flight."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from nvfp4_sgl import cli
from nvfp4_sgl.checkpoint.beside import DEFAULTS, FILES, check_beside
from nvfp4_sgl.errors import ConfigError
from nvfp4_sgl.serving import arguments
from tests.support.damage import change_json, copy_checkpoint, replace_bytes

VOCAB = 512
GIVEN = {"tokenizer_path": None, "skip_tokenizer_init": False}
GENERATION = "generation_config.json"


@pytest.fixture
def damaged(tiny: dict[str, Path], tmp_path: Path) -> Path:
    return copy_checkpoint(tiny["nvfp4-full"], tmp_path / "damaged")


def pipe(file: Path) -> None:
    file.unlink(missing_ok=True)
    os.mkfifo(file)


def add_token(file: Path) -> None:
    change_json(file, lambda value: value["model"]["vocab"].update({"beyond": VOCAB}))


DAMAGES: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "no tokenizer": ("tokenizer.json", Path.unlink, "not found; fetch it from the model's repository"),
    "cut tokenizer": ("tokenizer.json", lambda file: replace_bytes(file, file.read_bytes()[:-99]), "not valid JSON"),
    "empty tokenizer": ("tokenizer.json", lambda file: replace_bytes(file, b""), "not valid JSON"),
    "a tokenizer of another kind": ("tokenizer.json", lambda file: replace_bytes(file, b"{}"), "not a tokenizer"),
    "a token beyond the embedding": ("tokenizer.json", add_token, "'beyond': expected an id below"),
    "a list as settings": ("tokenizer_config.json", lambda file: replace_bytes(file, b"[1]"), "JSON object, found [1]"),
    "cut settings": ("tokenizer_config.json", lambda file: replace_bytes(file, b'{"a": '), "not valid JSON"),
    "bytes as a template": ("chat_template.jinja", lambda file: file.write_bytes(b"\xff"), "not a text"),
    "web page": (GENERATION, lambda file: replace_bytes(file, b"<html>"), "a web page"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_one_error_everywhere(
    damage: str, damaged: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name, change, message = DAMAGES[damage]
    change(damaged / name)
    with pytest.raises(ConfigError) as error:
        arguments.check_files_beside({**GIVEN, "model_path": str(damaged)}, VOCAB)
    assert str(error.value).startswith(f"{damaged / name}: ") and message in str(error.value)
    assert cli.main(["inspect", str(damaged)]) == 2
    assert message in capsys.readouterr().err
    assert cli.main(["doctor", str(damaged)]) == 1
    assert f"checkpoint: {damaged / name}: " in capsys.readouterr().out.replace("\n", " ").replace("  ", " ")
    assert cli.main(["verify", str(damaged), "--json"]) == 1
    (problem,) = json.loads(capsys.readouterr().out)["problems"]
    assert problem["message"] == str(error.value)
    assert cli.main(["convert", str(damaged), str(tmp_path / "out")]) == 2
    assert message in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_damage_beside_a_finished_conversion(
    tiny: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is not said to be whole."""
    out = tmp_path / "out"
    convert = ["convert", str(tiny["deepseek"]), str(out)]
    assert cli.main(convert) == cli.main(convert) == 0
    assert "every file is whole" in capsys.readouterr().out
    (out / "tokenizer.json").write_bytes(b"{}")
    assert cli.main(convert) == 2
    assert f"{out / 'tokenizer.json'}: not a tokenizer" in capsys.readouterr().err


@pytest.mark.parametrize("name", FILES)
def test_a_pipe_is_not_waited_for(name: str, damaged: Path) -> None:
    pipe(damaged / name)
    with pytest.raises(ConfigError, match=rf"{name}: expected a file, found a named pipe"):
        check_beside(damaged, VOCAB)


@pytest.mark.parametrize("name", DEFAULTS)
def test_defaults_that_no_request_may_have(name: str, damaged: Path) -> None:
    file, told = damaged / GENERATION, rf"{GENERATION}: (not valid JSON|{name}: expected an? (number|integer)) "
    for value in ("NaN", "Infinity", "-2", '"1"', "true", "[1]", "1e400", "1e31"):
        replace_bytes(file, f'{{"{name}": {value}}}'.encode())
        with pytest.raises(ConfigError, match=told):
            check_beside(damaged, VOCAB)
    for allowed in (1, None):
        replace_bytes(file, json.dumps({name: allowed}).encode())
        check_beside(damaged, VOCAB)


def test_ends_of_defaults(damaged: Path) -> None:
    def allowed(**fields: object) -> bool:
        replace_bytes(damaged / GENERATION, json.dumps(fields).encode())
        try:
            check_beside(damaged, VOCAB)
        except ConfigError:
            return False
        return True

    assert allowed(temperature=0, top_p=1.0, top_k=-1, min_p=0, repetition_penalty=2, eos_token_id=[1, 511])
    assert not allowed(top_p=0) and not allowed(top_k=0) and not allowed(top_k=1.5) and not allowed(min_p=1.1)
    assert allowed(temperature=1e30, repetition_penalty=1e-20)
    assert not allowed(temperature=1e31) and not allowed(repetition_penalty=1e-21)
    assert not allowed(repetition_penalty=0) and not allowed(repetition_penalty=2.1)
    assert not allowed(eos_token_id=512) and not allowed(eos_token_id=[1, "2"]) and not allowed(bos_token_id=-1)


def test_a_tokenizer_elsewhere_is_looked_at_there(damaged: Path, tiny: dict[str, Path], tmp_path: Path) -> None:
    (damaged / "tokenizer.json").unlink()
    given = {**GIVEN, "model_path": str(damaged)}
    arguments.check_files_beside({**given, "skip_tokenizer_init": True}, VOCAB)
    arguments.check_files_beside({**given, "tokenizer_path": str(tiny["nvfp4-full"])}, VOCAB)
    with pytest.raises(ConfigError, match=r"tokenizer.json: not found"):
        arguments.check_files_beside({**given, "tokenizer_path": str(tmp_path)}, VOCAB)


def test_config_alone_needs_no_tokenizer(damaged: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Memory is forecast from it."""
    alone = tmp_path / "alone"
    alone.mkdir()
    (alone / "config.json").write_bytes((damaged / "config.json").read_bytes())
    cli.main(["doctor", str(alone)])
    assert "tokenizer" not in capsys.readouterr().out
