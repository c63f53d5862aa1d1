"""A small byte-level BPE tokenizer with DeepSeek-V4's special tokens, for tiny checkpoints.

Deterministic, complete over all bytes, and small enough that every id of a 512-row vocabulary means something. The
special tokens are those that SGLang's DeepSeek-V4 chat encoder, reasoning parser and tool parser look up by id.
There is no chat template, as in DeepSeek's release: prompts are rendered by the chat encoder, which writes BOS itself.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from nvfp4_sgl.errors import ConfigError

BOS, EOS, PAD = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"
BOS_ID, EOS_ID = 0, 1

CONTROL_TOKENS = (BOS, EOS, PAD)
"""Dropped from decoded text."""

MARKUP_TOKENS = (
    *("<｜System｜>", "<｜User｜>", "<｜Assistant｜>", "<think>", "</think>", "｜DSML｜", "<｜latest_reminder｜>"),
    *("<｜action｜>", "<｜query｜>", "<｜authority｜>", "<｜domain｜>", "<｜title｜>", "<｜read_url｜>"),
    *("<｜deepseek_image｜>", "<｜ref｜>", "<｜/ref｜>", "<｜box｜>", "<｜/box｜>"),
    *("<｜point｜>", "<｜/point｜>", "<｜polygon｜>", "<｜/polygon｜>"),
)
"""Single ids, but part of the decoded text: parsers must see ``</think>`` and the tool-call markup."""

CORPUS = (
    "The quick brown fox jumps over the lazy dog. A model reads tokens and writes the next one; the cache keeps what"
    " it has read. Once there was a small house at the edge of the forest where an old engineer lived with her"
    " machines. She would wake before the sun and listen to the sound of the fans, then write down what they had"
    " measured in the night: numbers that were not measured were never written. What is the weather in Paris today?"
    " How many words are in this sentence? Please answer with one word, then explain your reasoning step by step."
    " First we compress four tokens into one entry, and then one hundred and twenty eight tokens into another."
    ' {"name": "get_weather", "arguments": {"city": "Paris", "unit": "celsius"}} {"type": "object", "properties":'
    ' {"value": {"type": "string"}, "count": {"type": "integer"}}, "required": ["value", "count"]} true false null'
    ' <tool_result>{"temperature": 21}</tool_result> invoke name="f" parameter name="x" string="true" tool_calls'
    " def main(self): return [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 100, 1000] for value in range(10): print(value)"
)


def build_tokenizer(vocab_size: int) -> Tokenizer:
    """The tokenizer with exactly ``vocab_size`` ids: special tokens, 256 bytes, merges, then unused placeholders."""
    special = len(CONTROL_TOKENS) + len(MARKUP_TOKENS)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    if vocab_size < special + len(alphabet):
        raise ConfigError(f"vocab_size: expected at least {special + len(alphabet)}, found {vocab_size}")
    merges = learn_merges(CORPUS, vocab_size - special - len(alphabet))
    tokens = [*CONTROL_TOKENS, *MARKUP_TOKENS, *alphabet, *(left + right for left, right in merges)]
    # Not added tokens: Flash's vocabulary has 128 thousand, which take half a minute to load, and a server loads them
    # three times.
    tokens += [f"<｜place▁holder▁no▁{n}｜>" for n in range(vocab_size - len(tokens))]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in CONTROL_TOKENS])
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=False) for token in MARKUP_TOKENS])
    if tokenizer.get_vocab_size() != vocab_size:
        raise ConfigError(f"tokenizer: expected {vocab_size} ids, made {tokenizer.get_vocab_size()}")
    return tokenizer


def learn_merges(text: str, count: int) -> list[tuple[str, str]]:
    """At most ``count`` byte-pair merges of ``text``: always the most frequent pair, ties to the smaller pair."""
    pieces = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(text)
    words = Counter(tuple(piece) for piece, _ in pieces)
    merges: list[tuple[str, str]] = []
    while len(merges) < count:
        pairs: Counter[tuple[str, str]] = Counter()
        for word, times in words.items():
            for pair in itertools.pairwise(word):
                pairs[pair] += times
        if not pairs:
            break
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        merges.append(best)
        merged: Counter[tuple[str, ...]] = Counter()
        for word, times in words.items():
            merged[_merge(word, best)] += times
        words = merged
    return merges


def _merge(word: tuple[str, ...], pair: tuple[str, str]) -> tuple[str, ...]:
    out: list[str] = []
    for symbol in word:
        if out and (out[-1], symbol) == pair:
            out[-1] += symbol
        else:
            out.append(symbol)
    return tuple(out)


def write_tokenizer(directory: Path, vocab_size: int, model_max_length: int) -> None:
    """Write tokenizer.json and tokenizer_config.json for ``PreTrainedTokenizerFast``."""
    text = build_tokenizer(vocab_size).to_str(pretty=True)
    (directory / "tokenizer.json").write_text(text + "\n", encoding="utf-8")
    config = {
        "add_bos_token": False,
        "add_eos_token": False,
        "bos_token": BOS,
        "clean_up_tokenization_spaces": False,
        "eos_token": EOS,
        "model_max_length": model_max_length,
        "pad_token": EOS,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    text = json.dumps(config, indent=2, ensure_ascii=False)
    (directory / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")
