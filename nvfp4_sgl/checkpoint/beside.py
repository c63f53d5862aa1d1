"""Files that the server reads beside config.json and the weights: one table, with the check of each.

SGLang ends in a traceback where one of them is damaged, waits for ever where it is a pipe, or starts and then refuses
every request that leaves a damaged default in force. ``inspect``, ``verify``, ``doctor``, ``convert`` and the server's
pre-flight refuse it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from nvfp4_sgl.errors import ConfigError
from nvfp4_sgl.files import MAX_CONFIG_BYTES, SHOWN_CHARACTERS, read_json, require_file, shown
from nvfp4_sgl.limits import MAX_TEMPERATURE, MIN_REPETITION_PENALTY

MAX_TOKENIZER_BYTES = 256 * 2**20
"""DeepSeek-V4's takes 8 MB."""
TOKENIZER = "tokenizer.json"
FETCH = "fetch it from the model's repository"


def check_tokenizer(file: Path, vocab_size: int) -> None:
    """Refuse a file that the tokenizers library cannot read, and token ids beyond the embedding."""
    require_object(read_json(file, ConfigError, MAX_TOKENIZER_BYTES, FETCH), file)
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises nothing more special
        raise ConfigError(f"{file}: not a tokenizer ({str(error)[:SHOWN_CHARACTERS]}); {FETCH}") from error
    vocabulary = tokenizer.get_vocab()
    if not vocabulary:
        raise ConfigError(f"{file}: expected a vocabulary, found no token; {FETCH}")
    token = max(vocabulary, key=lambda token: vocabulary[token])
    if vocabulary[token] >= vocab_size:
        raise ConfigError(
            f"{file}: token {shown(token)}: expected an id below config.json's vocab_size, {vocab_size}, found"
            f" {vocabulary[token]}; use the tokenizer that belongs to the weights"
        )


def check_object(file: Path, vocab_size: int) -> None:
    """Refuse anything but a JSON object."""
    require_object(read_json(file, ConfigError, MAX_CONFIG_BYTES, FETCH), file)


def check_text(file: Path, vocab_size: int) -> None:
    """Refuse anything but text of a usual size; the content is not checked."""
    size = require_file(file, ConfigError, FETCH)
    if size > MAX_CONFIG_BYTES:
        raise ConfigError(f"{file}: expected at most {MAX_CONFIG_BYTES} bytes, found {size}; {FETCH}")
    try:
        file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: not a text ({str(error)[:SHOWN_CHARACTERS]}); {FETCH}") from error


@dataclass(frozen=True)
class Default:
    """Allowed values of a sampling default: numbers from ``low`` (not itself if ``open``) to ``high``, or ``other``."""

    low: float
    high: float
    open: bool = False
    whole: bool = False
    other: int | None = None

    def allows(self, value: object) -> bool:
        """Whether ``value`` is one of them."""
        if isinstance(value, bool) or not isinstance(value, int if self.whole else (int, float)):
            return False
        return value == self.other or ((self.low < value if self.open else self.low <= value) and value <= self.high)

    def __str__(self) -> str:
        kind = "an integer" if self.whole else "a number"
        start = f"above {self.low:g} and up to" if self.open else f"from {self.low:g} to"
        return f"{kind} {start} {self.high:g}" + (f", or {self.other}" if self.other is not None else "")


DEFAULTS: Mapping[str, Default] = {
    "temperature": Default(0, MAX_TEMPERATURE),
    "top_p": Default(0, 1, open=True),
    "top_k": Default(1, 2**30, whole=True, other=-1),
    "min_p": Default(0, 1),
    "repetition_penalty": Default(MIN_REPETITION_PENALTY, 2),
}
"""Fields of generation_config.json that SGLang applies to every request that does not set them."""

IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
"""Fields of generation_config.json that name tokens."""


def check_generation(file: Path, vocab_size: int) -> None:
    """Refuse defaults that no request may have, and invalid token ids."""
    found = require_object(read_json(file, ConfigError, MAX_CONFIG_BYTES, FETCH), file)
    for name, allowed in DEFAULTS.items():
        if found.get(name) is not None and not allowed.allows(found[name]):
            raise ConfigError(
                f"{file}: {name}: expected {allowed}, found {shown(found[name])}; correct it, or remove the field"
            )
    for name in IDS:
        value = found.get(name)
        for token in value if isinstance(value, list) else [] if value is None else [value]:
            if type(token) is not int or not 0 <= token < vocab_size:
                raise ConfigError(
                    f"{file}: {name}: expected token ids from 0 to {vocab_size - 1}, found {shown(value)};"
                    " correct it, or remove the field"
                )


@dataclass(frozen=True)
class Row:
    """A file: who reads it, what is checked, and whether the server needs it."""

    reader: str
    check: Callable[[Path, int], None]
    is_needed: bool = False


FILES: Mapping[str, Row] = {
    TOKENIZER: Row("the tokenizers library, for SGLang's front end and deepseek-recipe", check_tokenizer, True),
    "tokenizer_config.json": Row("transformers, for its tokenizer", check_object),
    "special_tokens_map.json": Row("transformers, for its tokenizer", check_object),
    "added_tokens.json": Row("transformers, for its tokenizer", check_object),
    "chat_template.jinja": Row("transformers; the server uses none", check_text),
    "chat_template.json": Row("transformers; the server uses none", check_object),
    "generation_config.json": Row("SGLang, for defaults of sampling and what ends an answer", check_generation),
    "preprocessor_config.json": Row("transformers, where a checkpoint has one", check_object),
    "processor_config.json": Row("transformers, where a checkpoint has one", check_object),
}
"""All files that are read beside config.json, hf_quant_config.json and the weights with their index."""


def check_beside(directory: Path, vocab_size: int, *, needs_tokenizer: bool = True) -> None:
    """Check every file of :data:`FILES` that is in ``directory``.

    Args:
        needs_tokenizer: demand the files that a server cannot do without.

    Raises:
        ConfigError: one is absent, no regular file, damaged, or says what no server can do.
    """
    for name, row in FILES.items():
        file = directory / name
        if os.path.lexists(file) or (row.is_needed and needs_tokenizer):
            row.check(file, vocab_size)


def require_object(value: Any, file: Path) -> dict[str, Any]:
    """``value``, which must be a JSON object."""
    if not isinstance(value, dict):
        raise ConfigError(f"{file}: expected a JSON object, found {shown(value)}; {FETCH}")
    return value
