"""launch/evaluate without a server: divergences, dumps, questions, and what it refuses."""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.packaging.checkout import ROOT

sys.path.append(str(ROOT / "launch"))  # its scripts import each other by bare name

from programs import evaluate
from programs.evaluate import EvaluationError, Scored, compare, divergence, interval, is_right, read_dump, read_texts

VOCABULARY = 50


def distributions(count: int, seed: int) -> Tensor:
    """fp64 log-probabilities [count, VOCABULARY], some nearly certain."""
    generator = torch.Generator().manual_seed(seed)
    spread = torch.rand(count, 1, generator=generator, dtype=torch.float64) * 8
    return (torch.randn(count, VOCABULARY, generator=generator, dtype=torch.float64) * spread).log_softmax(-1)


def likeliest(row: Tensor, count: int) -> list[tuple[int, float]]:
    values, ids = row.topk(count)
    return list(zip(ids.tolist(), values.tolist(), strict=True))


def test_divergence_of_whole_distributions_is_exact() -> None:
    p, q = distributions(40, 1), distributions(40, 2)
    exact = (p.exp() * (p - q)).sum(-1)
    for one, other, expected in zip(p, q, exact, strict=True):
        kl, merged = divergence(likeliest(one, VOCABULARY), likeliest(other, VOCABULARY))
        assert kl == pytest.approx(expected.item(), rel=1e-6, abs=1e-6) and merged < 1e-9


def test_merging_gives_a_lower_bound() -> None:
    p = distributions(60, 3)
    q = (p + torch.randn(60, VOCABULARY, generator=torch.Generator().manual_seed(4)) * 0.3).log_softmax(-1)
    exact = (p.exp() * (p - q)).sum(-1)
    for one, other, expected in zip(p, q, exact, strict=True):
        found = [divergence(likeliest(one, top), likeliest(other, top))[0] for top in (1, 8, 32, VOCABULARY)]
        assert all(kl <= expected.item() + 1e-9 for kl in found)
        assert found[-1] == pytest.approx(expected.item(), abs=1e-6)
    assert divergence(likeliest(p[0], 8), likeliest(p[0], 8))[0] == pytest.approx(0, abs=1e-9)


def scored(rows: Tensor, top: int = VOCABULARY) -> Scored:
    ids = [3, *rows.argmin(-1).tolist()]
    logprobs = rows.gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()
    return Scored(ids, logprobs, [likeliest(row, top) for row in rows])


def test_what_a_comparison_states() -> None:
    p, q = distributions(200, 5), distributions(200, 6)
    found = compare([scored(p[:150]), scored(p[150:])], [scored(q[:150]), scored(q[150:])])
    exact = (p.exp() * (p - q)).sum(-1)
    assert found.tokens == 200
    assert found.kl_mean == pytest.approx(exact.mean().item())
    assert found.kl_median == pytest.approx(exact.median().item(), rel=0.1)
    assert found.kl_99 == pytest.approx(exact.sort().values[198].item())
    assert found.same_top == pytest.approx((p.argmax(-1) == q.argmax(-1)).double().mean().item())
    said = torch.tensor([*scored(p[:150]).logprobs, *scored(p[150:]).logprobs])
    assert found.perplexity_recorded == pytest.approx((-said.mean()).exp().item(), rel=1e-5)
    text, place, kl = found.worst[0]
    row = int(exact.argmax())
    assert (text, place) == (0, row + 1) if row < 150 else (1, row - 149)
    assert kl == pytest.approx(exact.max().item())


def test_texts(tmp_path: Path) -> None:
    plain, lines = tmp_path / "a.txt", tmp_path / "a.jsonl"
    plain.write_text("one\n\n two \n")
    lines.write_text('{"text": "one"}\n{"text": "1\\n2"}\n')
    assert read_texts(plain) == ["one", " two "]
    assert read_texts(lines) == ["one", "1\n2"]
    for content, message in (('{"texts": "one"}\n', "a.jsonl:1: expected a JSON object with 'text'"), ("{", "no JSON")):
        lines.write_text(content)
        with pytest.raises(EvaluationError, match=message):
            read_texts(lines)
    plain.write_text("\n")
    with pytest.raises(EvaluationError, match="expected texts"):
        read_texts(plain)


def test_damaged_dumps_are_refused(tmp_path: Path) -> None:
    head = {"format": evaluate.FORMAT, "top": 2, "model": "m", "texts": 1}
    entry = {"ids": [1, 2], "logprobs": [-0.5], "top": [[[2, -0.5], [3, -1.0]]]}
    dump = tmp_path / "dump"

    def write(*lines: dict[str, Any]) -> bytes:
        data = gzip.compress("".join(json.dumps(line) + "\n" for line in lines).encode())
        dump.write_bytes(data)
        return data

    whole = write(head, entry)
    assert read_dump(dump)[1] == [Scored([1, 2], [-0.5], [[(2, -0.5), (3, -1.0)]])]
    dump.write_bytes(whole[:-12])
    with pytest.raises(EvaluationError, match="expected a dump"):
        read_dump(dump)
    for lines in ([head], [head, entry, entry], [{**head, "format": 2}, entry]):
        write(*lines)
        with pytest.raises(EvaluationError, match="expected 1 texts of format 1"):
            read_dump(dump)
    write({"texts": 1}, {"ids": 5})
    with pytest.raises(EvaluationError, match="expected a dump"):
        read_dump(dump)


def answer_with(monkeypatch: pytest.MonkeyPatch, tokens: list[Any], top: list[Any]) -> None:
    meta = {"input_token_logprobs": tokens, "input_top_logprobs": top}
    monkeypatch.setattr(evaluate, "post", lambda *_: {"meta_info": meta})


def test_answers_that_are_no_log_probabilities_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    right = [[None, 4, None], [-0.5, 5, None]], [None, [[-0.5, 5, None]]]
    answer_with(monkeypatch, *right)
    assert evaluate.score("url", 1, "text") == Scored([4, 5], [-0.5], [[(5, -0.5)]])
    answer_with(monkeypatch, right[0], [None, [[float("nan"), 5, None]]])
    with pytest.raises(EvaluationError, match="not finite"):
        evaluate.score("url", 1, "text")
    answer_with(monkeypatch, *right)
    with pytest.raises(EvaluationError, match="of 3 tokens, found 2"):
        evaluate.score("url", 1, [4, 5, 6])


@pytest.mark.parametrize(
    ("question", "reply", "right"),
    [
        ({"answer": "42"}, "It is 42.", True),
        ({"answer": 42}, "It is 142.", False),
        ({"answer": "Paris"}, "paris, of course", True),
        ({"answer": "a+b"}, "a+b", True),
        ({"answer": "x", "pattern": r"= *7$"}, "so it is = 7", True),
        ({"answer": "x", "pattern": r"= *7$"}, "x", False),
    ],
)
def test_replies_are_judged(question: dict[str, Any], reply: str, right: bool) -> None:
    assert is_right(question, reply) is right


@pytest.mark.parametrize("drafts", [True, False])
def test_rounds_of_a_server_that_drafts(drafts: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Others, which may refuse the field that asks for them, are not asked."""
    bodies: list[dict[str, Any]] = []
    counts = {"spec_verify_ct": 10, "spec_num_proposed_drafts": 30, "spec_correct_drafts_histogram": [5, 2, 0, 3]}

    def post(url: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
        bodies.append(body)
        found = {"sglext": {"spec_tokens_details": counts}} if body.get("return_spec_tokens_details") else {}
        return {"choices": [{"message": {"content": "7"}}], **found}

    for name, value in (("post", post), ("model_of", lambda url: "m"), ("drafts", lambda url: drafts)):
        monkeypatch.setattr(evaluate, name, value)
    file = tmp_path / "questions.jsonl"
    file.write_text('{"question": "a=7; a?", "answer": 7}\n' * 3)
    found = evaluate.questions("url", file, 8, 1)
    assert found["right"] == 3 == len(bodies)
    expected = {"rounds": 30, "tokens": 2.1, "guesses": 3, "right_by_place": [0.5, 0.6, 1.0]}
    assert found["drafts"] == (expected if drafts else None)
    assert all(("return_spec_tokens_details" in body) is drafts for body in bodies)


def test_interval_of_a_share() -> None:
    """Wilson (1927): 8 of 10 gives 0.49 to 0.94, none of 20 up to 0.16."""
    assert interval(8, 10) == pytest.approx((0.4902, 0.9433), abs=1e-4)
    assert interval(0, 20) == pytest.approx((0.0, 0.1611), abs=1e-4)


def test_a_server_that_is_not_there(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    texts = tmp_path / "texts"
    texts.write_text("one\n")
    assert evaluate.main(["http://127.0.0.1:9", "record", str(texts), str(tmp_path / "dump")]) == 2
    assert "is the server up?" in capsys.readouterr().err
    assert not (tmp_path / "dump").exists()
