"""The tiny tokenizer: every id means something, any text survives, and SGLang's chat encoder finds its tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from nvfp4_sgl.errors import ConfigError
from nvfp4_sgl.synthetic.tokenizer import BOS, CONTROL_TOKENS, EOS, MARKUP_TOKENS, build_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tiny: dict[str, Path]) -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(tiny["nvfp4-full"])


def test_ids(tokenizer: PreTrainedTokenizerFast) -> None:
    assert isinstance(tokenizer, PreTrainedTokenizerFast) and len(tokenizer) == 512
    assert (tokenizer.bos_token, tokenizer.bos_token_id) == (BOS, 0)
    assert (tokenizer.eos_token, tokenizer.eos_token_id, tokenizer.pad_token_id) == (EOS, 1, 1)
    assert sorted(tokenizer.get_vocab().values()) == list(range(512))
    assert tokenizer.convert_tokens_to_ids([*CONTROL_TOKENS, *MARKUP_TOKENS]) == list(range(25))
    assert tokenizer.chat_template is None
    assert tokenizer.encode("a") == tokenizer.encode("a", add_special_tokens=False)


@pytest.mark.parametrize(
    "text", ["The quick brown fox", "  spaces\n\ttabs ", "üñïçødé 漢字 🙂 \x00\x7f", '{"name": [1, 2.5]}']
)
def test_round_trip(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_merges_are_used(tokenizer: PreTrainedTokenizerFast) -> None:
    text = "The cache keeps what the model has read."
    assert len(tokenizer.encode(text)) < 0.6 * len(text)


def test_markup_is_one_token_each_and_survives_decoding(tokenizer: PreTrainedTokenizerFast) -> None:
    text = "x".join(MARKUP_TOKENS)
    ids = tokenizer.encode(text)
    assert len(ids) == 2 * len(MARKUP_TOKENS) - 1
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert tokenizer.decode(tokenizer.encode(f"a{EOS}b"), skip_special_tokens=True) == "ab"
    call = '<｜DSML｜invoke name="f">'
    assert tokenizer.convert_tokens_to_ids("｜DSML｜") in tokenizer.encode(call)


@pytest.mark.parametrize("thinking", [False, True])
def test_sglangs_chat_encoder_renders_with_it(tokenizer: PreTrainedTokenizerFast, thinking: bool) -> None:
    from sglang.srt.parser.deepseek_recipe_renderer import TASK_TOKENS, DeepSeekRecipe

    recipe = DeepSeekRecipe.from_hf_tokenizer("dsv4", tokenizer)
    tool = {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {"x": {"type": "string"}}}}
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": "y"}'}}
    messages = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "ok"},
        {"role": "user", "content": "bye"},
    ]
    ids = recipe.encode({"messages": messages, "thinking": thinking, "tools": [{"type": "function", "function": tool}]})
    text = tokenizer.decode(ids)
    assert ids[0] == 0 and ids.count(0) == 1
    assert text.endswith("<｜Assistant｜><think>" if thinking else "<｜Assistant｜></think>")
    assert '<｜DSML｜parameter name="x" string="true">y</｜DSML｜parameter>' in text
    for task, token in TASK_TOKENS.items():
        with_task = recipe.encode({"messages": messages[:2], "thinking": thinking}, task=task)
        assert with_task[-1] == tokenizer.convert_tokens_to_ids(token)


def test_other_sizes() -> None:
    small, large = build_tokenizer(300), build_tokenizer(2000)
    assert (small.get_vocab_size(), large.get_vocab_size()) == (300, 2000)
    assert large.decode(large.encode("hello there").ids) == "hello there"
    with pytest.raises(ConfigError, match="vocab_size: expected at least 281, found 280"):
        build_tokenizer(280)
