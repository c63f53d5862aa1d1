"""The bound on a text follows from the tokenizer and from what a request can hold."""

from __future__ import annotations

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

from nvfp4_sgl.serving.text_limits import MAX_SCORED, TextLimit, contents, longest_token, score_fault
from nvfp4_sgl.synthetic.tokenizer import build_tokenizer

LIMIT = TextLimit(tokens=10, token_bytes=4)


def test_longest_token_of_the_tiny_tokenizer() -> None:
    """Each id decoded: none stands for more bytes."""
    tokenizer = build_tokenizer(512)
    longest = longest_token(tokenizer)
    assert longest == max(len(tokenizer.decode([token], skip_special_tokens=False).encode()) for token in range(512))


def words(**settings: object) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(vocab={"a": 0, "ab": 1, "b": 2}, merges=[("a", "b")]))
    for name, value in settings.items():
        setattr(tokenizer, name, value)
    return tokenizer


def test_longest_token_of_others() -> None:
    assert longest_token(words()) == 8, "two characters, of up to four bytes"
    assert longest_token(words(decoder=decoders.ByteLevel())) == 2
    assert longest_token(words(normalizer=normalizers.Sequence([]))) == 8
    assert longest_token(words(normalizer=normalizers.NFC())) is None
    greedy = words()
    greedy.add_tokens([AddedToken("<x>", lstrip=True)])
    assert longest_token(greedy) is None
    greedy = words()
    greedy.add_tokens([AddedToken("<｜long｜>" * 3)])
    assert longest_token(greedy) == 3 * len("<｜long｜>".encode())


def test_text_up_to_the_bound() -> None:
    assert LIMIT.text_fault("text", ["a" * 40]) is None
    assert LIMIT.text_fault("text", ["ä" * 20]) is None
    for texts in (["a" * 41], ["ä" * 20, "b"], ["\ud800" * 14]):
        fault = LIMIT.text_fault("text", texts)
        assert fault is not None and fault.startswith("text: found 4") and "expected 40 or fewer" in fault


def test_ids_up_to_the_bound() -> None:
    assert LIMIT.ids_fault("tokens", [1] * 10) is None
    assert "found 11 token ids; expected 10" in str(LIMIT.ids_fault("tokens", [1] * 11))


def test_contents_of_messages() -> None:
    parts = [{"type": "text", "text": "b"}, {"type": "image_url"}, "c"]
    assert list(contents([{"content": "a"}, {"content": parts}, {"content": None}, {}])) == ["a", "b"]


@pytest.mark.parametrize(
    ("query", "items", "found"),
    [
        ("a" * 30, ["b" * 10] * 9, None),
        ("a" * 30, ["b", "b" * 11], "query and item: found 41 bytes"),
        ("a" * 41, "b", "query and item: found 42 bytes"),
        (None, ["b" * 40], None),
        ("a" * 40, [""] * (MAX_SCORED // 40 + 1), "characters"),
        ([1] * 1000, [[]] * (MAX_SCORED // 1000 + 1), "token ids"),
    ],
)
def test_scores(query: object, items: object, found: str | None) -> None:
    fault = score_fault(LIMIT, query, items)
    assert fault is None if found is None else found in str(fault)
