"""What launch/soak asks for, and which answers it takes for whole."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(ROOT / "launch"), *sys.path])


def answer(tokens: int, reason: str) -> dict[str, Any]:
    return {"output_ids": [5] * tokens, "meta_info": {"finish_reason": {"type": reason}}}


def test_a_regular_expression_may_end_an_answer() -> None:
    from soak import Request

    plain, regex = ({"sampling_params": {"max_new_tokens": 8, **more}} for more in ({}, {"regex": "[a-z]{2,9}"}))
    assert Request("answered", body=plain).is_whole(answer(8, "length"))
    assert not Request("answered", body=plain).is_whole(answer(7, "stop"))
    assert Request("answered", body=regex).is_whole(answer(7, "stop"))
    assert not Request("answered", body=regex).is_whole(answer(7, "length"))


def test_what_is_drawn() -> None:
    """All kinds, within bounds, and in words that tell what was asked."""
    from soak import draw

    rng = random.Random(1)
    drawn = [draw(rng, 500, 1024) for _ in range(300)]
    assert {request.kind for request in drawn} == {"answered", "hung up", "aborted", "malformed"}
    for request in drawn:
        assert request.kind in str(request) and "\n" not in str(request)
        if request.kind == "malformed":
            assert request.data
            continue
        assert 1 <= len(request.body["input_ids"]) <= 1024 and max(request.body["input_ids"]) < 500
        assert request.body["stream"] == bool(request.seconds) and json.dumps(request.body)
