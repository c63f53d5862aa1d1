"""launch/evaluate on a real server, against transformers."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.packaging.checkout import ROOT
from tests.support.oracle import cached_hf_model, hf_logits
from tests.support.prompts import clear_ids

pytestmark = [pytest.mark.server, pytest.mark.timeout(900)]

VOCABULARY, LENGTHS = 512, (40, 150)


def run(*arguments: object) -> str:
    command = [
        sys.executable,
        str(ROOT / "launch/programs/run.py"),
        "launch/programs/evaluate.py",
        *map(str, arguments),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_kl_is_that_of_transformers(serve, tiny_checkpoints, tmp_path: Path) -> None:
    """A dump of the model before quantisation, made by transformers: the served one is as far from it as theirs is."""
    checkpoint = tiny_checkpoints("nvfp4-full")
    server = serve(checkpoint)
    quantised, before = cached_hf_model(checkpoint), cached_hf_model(tiny_checkpoints("bf16"))
    entries: list[dict[str, Any]] = []
    divergences, agreements = [], []
    for length in LENGTHS:
        # SGLang names the last id of the vocabulary 0.
        ids = [token % (VOCABULARY - 1) for token in clear_ids(quantised, length, seed=length)]
        p, q = (hf_logits(model, ids).double().log_softmax(-1)[:-1] for model in (before, quantised))
        divergences.append((p.exp() * (p - q)).sum(-1))
        agreements.append(p.argmax(-1) == q.argmax(-1))
        order = p.sort(-1, descending=True)
        top = [list(zip(i.tolist(), v.tolist(), strict=True)) for i, v in zip(order.indices, order.values, strict=True)]
        said = p.gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()
        entries.append({"ids": ids, "logprobs": said, "top": top})
    head = {"format": 1, "top": VOCABULARY, "model": "before", "texts": len(entries)}
    dump, report = tmp_path / "dump", tmp_path / "report.json"
    dump.write_bytes(gzip.compress("".join(json.dumps(line) + "\n" for line in (head, *entries)).encode()))
    run(server.url, "compare", dump, "--output", report)
    found = json.loads(report.read_text())
    assert found["tokens"] == sum(LENGTHS) - len(LENGTHS)
    exact = torch.cat(divergences)
    assert found["kl_mean"] == pytest.approx(exact.mean().item(), rel=0.02, abs=1e-4)
    assert found["same_top"] == pytest.approx(torch.cat(agreements).double().mean().item(), abs=0.02)


def test_a_server_agrees_with_itself(serve, tiny_checkpoints, tmp_path: Path) -> None:
    server = serve(tiny_checkpoints("nvfp4-full"))
    texts, dump, report = (tmp_path / name for name in ("texts", "dump", "report.json"))
    texts.write_text("The quick brown fox\nOnce upon a time there was a checkpoint\n")
    assert "2 texts" in run(server.url, "record", texts, dump, "--top", 20)
    assert "same likeliest token        100.00%" in run(
        server.url, "compare", dump, "--max-kl", 1e-6, "--output", report
    )
    assert json.loads(report.read_text())["kl_mean"] < 1e-6
    questions = tmp_path / "questions.jsonl"
    questions.write_text('{"question": "Say it", "pattern": ""}\n{"question": "And?", "answer": "no such answer"}\n')
    assert "1 of 2 right, 50.0%" in run(server.url, "questions", questions, "--max-tokens", 8)
