"""``nvfp4-sgl trace`` on records made by hand: partly compared, damaged, or given options that do nothing."""

from __future__ import annotations

import json
import math
import os
import random
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nvfp4_sgl.cli import main
from nvfp4_sgl.config import ModelConfig
from nvfp4_sgl.errors import ConfigError
from nvfp4_sgl.synthetic.tiny import write_tiny
from nvfp4_sgl.tracing.contents import FORMAT, SKETCH
from nvfp4_sgl.tracing.fed import check_fed
from nvfp4_sgl.tracing.reading import read_record

NAMES = ("layers.0.hc_attn.x", "layers.0.attn.attend", "layers.0.attn.wo_b", "hc_head.x")
Line = dict[str, Any]
Lines = list[Line]


def lines(*fed: list[int], rank: int = 0, ranks: int = 1) -> Lines:
    """A record whose passes go on from each other."""
    found: Lines = [{"format": FORMAT, "target": "cpu", "mode": "w4a16", "rank": rank, "ranks": ranks}]
    start, source = 0, random.Random(5)
    for number, ids in enumerate(fed):
        positions = list(range(start, start + len(ids)))
        start += len(ids)
        ops = [
            {
                "name": name,
                "shape": [len(ids), 8],
                "digest": f"{source.getrandbits(64):016x}",
                "nan": 0,
                "inf": 0,
                "amax": 3.0,
                "rms": 1.0,
                "sketch": [source.gauss(0, 3) for _ in range(SKETCH)],
            }
            for name in NAMES
        ]
        digests = [f"{sum(ids):016x}", f"{sum(positions):016x}"]
        found.append({"pass": number, "ids": ids, "positions": positions, "input": digests, "ops": ops})
    return found


def written(file: Path, record: Lines) -> str:
    file.write_text("".join(json.dumps(line) + "\n" for line in record))
    return str(file)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("fed") / "tiny"
    write_tiny(path, "nvfp4-full", seed=3, num_hidden_layers=2, n_routed_experts=6)
    return path


@pytest.fixture
def good(tmp_path: Path) -> str:
    return written(tmp_path / "good", lines([5, 6, 7], [8], [9]))


def as_json(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, Any]]:
    status = main(["trace", *words, "--json"])
    return status, json.loads(capsys.readouterr().out)


def error_of(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    assert main(["trace", *map(str, words)]) == 2
    said = capsys.readouterr()
    assert not said.out and said.err.count("\n") == 1
    return said.err


def test_what_other_ranks_hold_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = lines([5, 6]), lines([5, 6], ranks=2)
    for op in b[1]["ops"][1:3]:
        op["shape"], op["digest"] = [2, 4], "other"
    words = written(tmp_path / "a", a), written(tmp_path / "b", b)
    status, found = as_json(capsys, *words, "--exact")
    assert status == 0 and [op["name"] for op in found["ops"]] == [NAMES[0], NAMES[3]]
    assert {"attn.attend", "attn.wo_b", "ffn.experts"} < set(found["left_out"])
    assert main(["trace", *words]) == 0
    assert "A is of rank 0 of 1, B of rank 0 of 2" in capsys.readouterr().out
    b[1]["ops"][3]["digest"] = "other"
    assert main(["trace", words[0], written(tmp_path / "c", b), "--exact"]) == 1


def test_ranks_with_nothing_in_common_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records = [lines([5, 6], rank=rank, ranks=2) for rank in range(2)]
    for record in records:
        record[1]["ops"] = record[1]["ops"][1:3]
    message = error_of(capsys, *(written(tmp_path / f"rank{n}", record) for n, record in enumerate(records)))
    assert re.search(r"rank0 is of rank 0 of 2, .*rank1 of rank 1 of 2\. .* found only ranks' own", message)


def test_json_says_that_other_tokens_were_fed(good: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = written(tmp_path / "other", lines([5, 6, 7], [8], [10]))
    status, found = as_json(capsys, good, other)
    assert status == 1 and found["departs"] is None
    assert "pass 2: expected the same tokens" in found["stopped"] and "token 9 at position 4" in found["stopped"]


@pytest.mark.parametrize("swapped", [False, True])
def test_fewer_passes_are_no_success(
    swapped: bool, good: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [good, written(tmp_path / "short", lines([5, 6, 7]))]
    status, found = as_json(capsys, *(reversed(files) if swapped else files))
    a, b = (1, 3) if swapped else (3, 1)
    assert status == 1 and found["departs"] is None and found["recorded"] == [a, b]
    assert found["stopped"] == f"A has {a} passes, B {b}: only the first 1 were compared"
    assert main(["trace", *files]) == 1
    assert "A has 3 passes, B 1" in capsys.readouterr().out
    assert as_json(capsys, good, good)[1]["stopped"] is None


@pytest.mark.parametrize("swapped", [False, True])
def test_an_op_of_one_run_alone_is_an_error(
    swapped: bool, good: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = lines([5, 6, 7], [8], [9])
    record[2]["ops"].append(record[2]["ops"][0] | {"name": "layers.7.ffn.route"})
    files = [good, written(tmp_path / "more", record)]
    message = error_of(capsys, *(reversed(files) if swapped else files))
    assert re.search(r"layers\.7\.ffn\.route: in pass 1 of .*more, not of .*good", message)


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("figure", ["rms", "sketch"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_figure_that_is_no_number_departs(
    value: float, figure: str, swapped: bool, good: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = lines([5, 6, 7], [8], [9])
    record[2]["ops"][3][figure] = value if figure == "rms" else [value] * SKETCH
    files = [good, written(tmp_path / "bad", record)]
    status, found = as_json(capsys, *(reversed(files) if swapped else files))
    assert status == 1 and found["departs"]["name"] == NAMES[3] and found["departs"]["number"] == 1
    assert "expected finite numbers" in found["departs"]["why"]


def put(*keys: Any, value: Any) -> Callable[[Lines], None]:
    """Put ``value`` where ``keys`` lead; ``...`` for a field that is taken out."""

    def change(record: Lines) -> None:
        place: Any = record
        for key in keys[:-1]:
            place = place[key]
        if value is ...:
            del place[keys[-1]]
        else:
            place[keys[-1]] = value

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (put(2, value=[1]), r"line 3: expected an object, found \[1\]"),
        (put(0, "ranks", value=...), "line 1, field 'ranks': expected a whole number from 1, found nothing"),
        (put(0, "rank", value=1), "line 1, field 'rank': expected 0, found 1"),
        (put(0, "format", value=1), "line 1, field 'format': expected a first line with format 2, found 1"),
        (put(2, "pass", value=4), "line 3, field 'pass': expected 1, found 4"),
        (put(2, "input", value=...), "line 3, field 'input': expected two digests, found nothing"),
        (put(2, "ops", value=...), "line 3, field 'ops': expected a list with at least one op, found nothing"),
        (put(2, "ops", value=[]), r"line 3, field 'ops': .* found \[\]"),
        (put(2, "ops", 1, value=7), r"line 3, field 'ops\[1\]': expected an object, found 7"),
        (put(2, "ops", 1, "name", value=NAMES[0]), r"field 'ops\[1\].name': expected each op once, found"),
        (put(2, "ops", 1, "shape", value=[]), r"field 'ops\[1\].shape': expected a list of whole numbers from 1"),
        (put(2, "ops", 1, "shape", value=[1, 0]), r"field 'ops\[1\].shape'"),
        (put(2, "ops", 1, "sketch", value=[1.0]), rf"field 'ops\[1\].sketch': expected {SKETCH} numbers, found \[1.0"),
        (put(2, "ops", 1, "sketch", value=[10**400] * SKETCH), r"field 'ops\[1\].sketch'"),
        (
            put(2, "ops", 1, "rms", value="1"),
            r"field 'ops\[1\].rms': expected a number that is not negative, found '1'",
        ),
        (put(2, "ops", 1, "nan", value=True), r"field 'ops\[1\].nan': expected a whole number from 0, found True"),
        (put(2, "ids", value=...), "line 3, field 'ids': expected a list of whole numbers from 0, at least one, found"),
        (put(2, "ids", value=[]), r"line 3, field 'ids': .* found \[\]"),
        (put(2, "ids", value=[-1]), r"line 3, field 'ids': .* found \[-1\]"),
        (put(2, "positions", value=...), "line 3, field 'positions': .* found nothing"),
        (put(2, "positions", value=[3, 4]), "line 3, field 'positions': expected as many as ids, 1, found 2"),
        (put(2, "chose", value="a"), "line 3, field 'chose': expected a whole number from 0, found 'a'"),
    ],
)
def test_a_damaged_line_is_named(
    change: Callable[[Lines], None], message: str, good: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = lines([5, 6, 7], [8], [9])
    change(record)
    bad = written(tmp_path / "bad", record)
    for words in ((good, bad), (bad, good)):
        said = error_of(capsys, *words)
        assert re.search(f"{re.escape(bad)}: .*{message}", said), said


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 100_000 + "\n", "line 3: expected an object, found one that is nested too deeply"),
        ("\n", "line 3: expected an object of JSON, found ''"),
        ("notes\n", "line 3: expected an object of JSON, found 'notes'"),
        ('{"pass": 1, "ids": [8', "line 3: expected a whole line, found the record cut off there, after 21 bytes. "),
    ],
)
def test_a_line_that_is_no_json_is_named(
    text: str, message: str, good: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = Path(written(tmp_path / "bad", lines([5, 6, 7])))
    bad.write_text(bad.read_text() + text)
    said = error_of(capsys, good, bad)
    assert f"{bad}: {message}" in said
    assert ("delete that line to compare the passes before it, or record the run again" in said) == ("cut" in said)


@pytest.mark.parametrize("text", ["", '{"format": 2, "ra'])
def test_a_record_without_a_whole_first_line_is_refused(
    text: str, good: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = tmp_path / "bad"
    bad.write_text(text)
    said = error_of(capsys, good, bad)
    assert "record the run again" in said and "delete" not in said


def test_digests_that_contradict_their_tokens_are_named(
    good: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = lines([5, 6, 7], [8], [9])
    record[2]["input"] = ["0", "1"]
    said = error_of(capsys, good, written(tmp_path / "bad", record))
    assert "line 3, field 'input': expected equal digests of equal tokens" in said and "is damaged" in said


@pytest.mark.parametrize(
    ("ids", "positions", "message"),
    [
        ([10**9], [0], "line 2, field 'ids': expected token ids below .* the vocab_size of .*tiny, found 1000000000"),
        ([5], [10**9], "line 2, field 'positions': expected a pass that begins at 0 .* found one at 1000000000"),
        ([5, 6], [0, 0], "line 2: pass 0 is of several requests"),
    ],
)
def test_what_a_checkpoint_cannot_be_fed_is_refused(
    ids: list[int],
    positions: list[int],
    message: str,
    checkpoint: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    record = lines([5])
    record[1].update(ids=ids, positions=positions)
    assert re.search(message, error_of(capsys, written(tmp_path / "a", record), checkpoint))


def test_positions_that_the_model_does_not_have_are_refused(checkpoint: Path, good: str) -> None:
    record, config = read_record(Path(good)), ModelConfig.from_dir(checkpoint)
    check_fed(record, checkpoint, replace(config, max_position_embeddings=5))
    with pytest.raises(ConfigError, match="line 4, field 'positions': expected positions below 4, .*tiny, found 4;"):
        check_fed(record, checkpoint, replace(config, max_position_embeddings=4))


def test_a_prompt_is_no_longer_than_the_model_s_context(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = error_of(capsys, checkpoint, "--prompt", 10**9)
    assert "--prompt 1000000000 --steps 2: expected at most" in said and "max_position_embeddings" in said


@pytest.mark.parametrize(
    ("option", "value", "fed"),
    [
        ("--target", "cpu", False),
        ("--seed", "0", False),
        ("--prompt", "64", False),
        ("--steps", "2", False),
        ("--seed", "1", True),
        ("--prompt", "3", True),
        ("--steps", "1", True),
    ],
)
def test_options_that_a_record_cannot_follow_are_refused(
    option: str, value: str, fed: bool, good: str, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = error_of(capsys, good, checkpoint if fed else good, option, value)
    assert f"{option} {value}: {good} is a record" in said and f"leave {option} out" in said


def test_records_are_read_once_so_that_pipes_are_taken(good: str, capsys: pytest.CaptureFixture[str]) -> None:
    contents, ends = Path(good).read_bytes(), []
    for _ in range(2):
        reading, writing = os.pipe()
        os.write(writing, contents)
        os.close(writing)
        ends.append(reading)
    status, found = as_json(capsys, *(f"/dev/fd/{end}" for end in ends))
    for end in ends:
        os.close(end)
    assert status == 0 and len(found["passes"]) == 3 and len(found["ops"]) == 3 * len(NAMES)


def test_a_folder_with_neither_is_said_to_be_one(
    good: str, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    expected = f"{folder}: expected a folder with rank0.jsonl, or with config.json, found "
    for words in ((folder,), (good, folder), (checkpoint, folder), (folder, good, "--first-mode", "w4a4")):
        assert f"{expected}neither in it" in error_of(capsys, *words)
    (folder / "rank1.jsonl").touch()
    assert f"{expected}rank1.jsonl without it; name that file" in error_of(capsys, folder)
    assert "nowhere: expected a record, a folder of records or a checkpoint" in error_of(capsys, tmp_path / "nowhere")
