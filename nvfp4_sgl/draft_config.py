"""DSpark's fields of config.json, parsed and checked when a draft is asked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nvfp4_sgl.config import DSPARK_STAGES, ModelConfig
from nvfp4_sgl.config_fields import DSPARK, OF_DSPARK, Fixed, Repeats, same
from nvfp4_sgl.errors import ConfigError
from nvfp4_sgl.files import shown

MAX_BLOCK = 9
"""Most tokens of a block: with the one before it they are 10 rows of a verify pass, which SGLang's rings hold."""
MAX_MARKOV_RANK = 4096


@dataclass(frozen=True)
class DsparkConfig:
    """DSpark's fields, checked.

    Attributes:
        block: tokens that are drafted at once.
        markov_rank: of the bias by the token before.
        noise_token: stands for the tokens of a block that are not known yet.
        captured_layers: of the target, ascending: the streams behind them are what the draft reads.
        stages: blocks of the draft.
    """

    block: int
    markov_rank: int
    noise_token: int
    captured_layers: tuple[int, ...]
    stages: int

    @classmethod
    def parse(cls, raw: Mapping[str, Any], config: ModelConfig, source: str = "config.json") -> DsparkConfig:
        """Parse the fields of a config.json dictionary whose other fields gave ``config``.

        Raises:
            ConfigError: a field is absent, out of range or unknown; names it.
        """
        _check_table(raw, config, source)
        layers = config.num_hidden_layers

        def integer(field: str, least: int, most: int) -> int:
            value = raw.get(field)
            if type(value) is not int or not least <= value <= most:
                raise _wrong(source, field, f"an integer from {least} to {most}", raw)
            return value

        captured = raw.get("dspark_target_layer_ids")
        if (
            not isinstance(captured, list)
            or not captured
            or any(type(layer) is not int or not 0 <= layer < layers for layer in captured)
            or captured != sorted(set(captured))
        ):
            expected = f"a list of layers from 0 to {layers - 1}, ascending, each once"
            raise _wrong(source, "dspark_target_layer_ids", expected, raw)
        stages = len(raw.get("compress_ratios", ())) - layers
        if not 1 <= stages <= DSPARK_STAGES or any(raw["compress_ratios"][layers:]):
            expected = f"{layers} entries, and a 0 for each of 1 to {DSPARK_STAGES} stages of the draft"
            raise _wrong(source, "compress_ratios", expected, raw)
        return cls(
            integer("dspark_block_size", 1, MAX_BLOCK),
            integer("dspark_markov_rank", 1, MAX_MARKOV_RANK),
            integer("dspark_noise_token_id", 0, config.vocab_size - 1),
            tuple(captured),
            stages,
        )


def _check_table(raw: Mapping[str, Any], config: ModelConfig, source: str) -> None:
    """Refuse fields of DSpark that are not known, and those that say what is not implemented."""
    for field in raw:
        if field.startswith(DSPARK) and field not in OF_DSPARK:
            raise _wrong(source, field, f"no other than {', '.join(OF_DSPARK)} for a DSpark draft", raw)
    for field, rule in OF_DSPARK.items():
        if isinstance(rule, Fixed) and not rule.takes(raw.get(field, rule.values[0])):
            raise _wrong(source, field, f"{rule} ({rule.reason}; nothing else is implemented)", raw)
        if isinstance(rule, Repeats) and raw.get(field) is not None and not same(raw[field], rule.expected(config)):
            expected = f"{rule.expected(config)}, as {rule.source} ({rule.reason}; that is not implemented)"
            raise _wrong(source, field, expected, raw)


def _wrong(source: str, field: str, expected: str, raw: Mapping[str, Any]) -> ConfigError:
    found = shown(raw[field]) if field in raw else "nothing"
    return ConfigError(f"{source}: field '{field}': expected {expected}, found {found}")
