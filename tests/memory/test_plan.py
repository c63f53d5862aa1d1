"""``nvfp4-sgl doctor`` for a server on a machine that is elsewhere: its flags, its verdict and its exit status."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from nvfp4_sgl import cli
from nvfp4_sgl.memory.plan import ServerFlags
from nvfp4_sgl.sglang_defaults import FRACTION, REQUESTS
from nvfp4_sgl.synthetic.tiny_config import TinyFormat, tiny_config

PLANNED = ("--target", "sm_100a", "--json")


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with config.json alone, on a machine without a GPU."""
    monkeypatch.setattr("nvfp4_sgl.targets.choose.detect_target", lambda: "cpu")
    raw = tiny_config(TinyFormat.NVFP4_FULL, {})
    (tmp_path / "config.json").write_text(json.dumps(raw))
    return tmp_path


@pytest.fixture
def plan(model: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    """``plan(flags)``: exit status and JSON of ``doctor DIR`` for a B200."""

    def run(*flags: str) -> tuple[int, dict[str, Any]]:
        status = cli.main(["doctor", str(model), *PLANNED, *flags])
        return status, json.loads(capsys.readouterr().out)

    return run


def test_a_plan_that_fits_says_how_many_tokens(plan: Any) -> None:
    status, report = plan("--gpu-memory", "8")
    memory = report["memory"]
    assert status == 0 and memory["fits"] is True and report["problems"] == []
    left = 8 * 2**30 * FRACTION - sum(memory["weights"].values()) - sum(memory["server"].values())
    expected = left / sum(memory["token"].values())
    assert 0 <= expected - memory["tokens"] < 256
    assert memory["setting"]["requests"] == REQUESTS


def test_a_plan_that_does_not_fit_fails(plan: Any) -> None:
    status, report = plan("--gpu-memory", "0.5")
    assert status == 1 and report["memory"]["fits"] is False
    assert "too little memory on a rank of --tp 1" in report["problems"][0]


def test_every_flag_changes_the_forecast(plan: Any) -> None:
    _, before = plan("--gpu-memory", "8")
    flags = {
        "--tp": ("2", "ranks", 2),
        "--max-running-requests": ("64", "requests", 64),
        "--context-length": ("1024", "context", 1024),
        "--mem-fraction-static": ("0.5", "fraction", 0.5),
    }
    for flag, (text, field, value) in flags.items():
        _, after = plan("--gpu-memory", "8", flag, text)
        assert after["memory"]["setting"][field] == value
        assert after["memory"]["tokens"] != before["memory"]["tokens"], flag
    assert plan("--gpu-memory", "8", "--kv-cache-dtype", "fp8_e4m3")[1]["memory"] == before["memory"]


def test_rows_of_a_cpu_by_their_dtype(plan: Any) -> None:
    row = {}
    for dtype in ("auto", "bfloat16", "fp8_e4m3"):
        _, report = plan("--target", "cpu", "--kv-cache-dtype", dtype)
        row[dtype] = report["memory"]["token"]["window rows"]
    assert row["auto"] == 2 * row["bfloat16"] > 2 * row["fp8_e4m3"]


def test_without_the_size_of_its_memory_no_verdict(plan: Any) -> None:
    status, report = plan()
    assert status == 0 and report["memory"]["fits"] is None and report["memory"]["tokens"] is None


def test_what_is_printed(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every line once, also where the arithmetic is what is wrong; no weights are called random."""
    for size, status, verdict in (("8", 0, "yes"), ("0.5", 1, "no")):
        assert cli.main(["doctor", str(model), "--target", "sm_100a", "--gpu-memory", size]) == status
        out = capsys.readouterr().out
        assert f"  fits                {verdict}\n" in out and "tokens  " in out and "RANDOM" not in out
        lines = [line.strip() for line in out.splitlines() if line.strip()]
        assert len(lines) == len(set(lines))


REFUSED = {
    "--tp": ["0", "-1", "two", "1.5", "1025"],
    "--gpu-memory": ["0", "-8", "nan", "inf", "eighty", "4097"],
    "--max-running-requests": ["0", "-1", "1e3", "1048577", "²"],
    "--context-length": ["0", "-1", "1.5", str(2**30 + 1)],
    "--mem-fraction-static": ["0", "1.01", "nan", "85%"],
    "--chunked-prefill-size": ["0", "-1", "8k", str(2**30 + 1)],
    "--target": ["sm_80"],
}


@pytest.mark.parametrize(("flag", "value"), [(flag, value) for flag, values in REFUSED.items() for value in values])
def test_values_out_of_range(flag: str, value: str, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["doctor", str(model), f"{flag}={value}"])
    error = capsys.readouterr().err
    assert end.value.code == 2 and flag in error and value in error


@pytest.mark.parametrize(
    ("flags", "texts"),
    [
        (("--target", "sm_90a", "--kv-cache-dtype", "bfloat16"), ("--kv-cache-dtype bfloat16", "auto, fp8_e4m3")),
        (("--kv-cache-dtype", "fp4"), ("--kv-cache-dtype fp4", "auto, bfloat16, fp8_e4m3 on cpu")),
        (("--context-length", "99999999"), ("--context-length 99999999", "max_position_embeddings")),
        (("--gpu-memory", "80"), ("--gpu-memory", "--target")),
        (("--chunked-prefill-size", "1000"), ("--chunked-prefill-size 1000", "a multiple of 256")),
    ],
)
def test_flags_that_the_target_or_the_model_does_not_take(
    flags: tuple[str, ...], texts: tuple[str, ...], model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["doctor", str(model), *flags]) == 2
    error = capsys.readouterr().err
    assert all(text in error for text in texts), error


def test_flags_without_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--gpu-memory", "80"]) == 2
    assert "DIR" in capsys.readouterr().err


@pytest.mark.parametrize("target", ["cpu", "sm_90a"])
def test_chunks_as_they_are_given(target: str) -> None:
    """Their activations, and graphs of prompts up to the largest that a chunk holds."""
    config: Any = type("Config", (), {"max_position_embeddings": 4096})
    plain, given = (ServerFlags(chunk=chunk).setting(target, config) for chunk in (None, 512))
    assert (plain.chunk, given.chunk) == ({"cpu": 1024, "sm_90a": 8192}[target], 512)
    assert given.prompt_tokens == (0 if target == "cpu" else 512)


@pytest.mark.parametrize("requests", [None, 64])
def test_the_window_pool_goes_by_requests_where_they_are_given(requests: int | None) -> None:
    config: Any = type("Config", (), {"max_position_embeddings": 4096})
    assert ServerFlags(requests=requests).setting("sm_100a", config).window_by_ratio is (requests is None)
