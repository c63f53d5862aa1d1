"""Checks that a checkpoint can be fed given tokens. Imports no torch, so that it answers at once."""

from __future__ import annotations

from pathlib import Path

from nvfp4_sgl.config import ModelConfig
from nvfp4_sgl.errors import ConfigError
from nvfp4_sgl.tracing.reading import Record


def check_drawn(prompt: int, steps: int, directory: Path, config: ModelConfig) -> None:
    """:class:`ConfigError` if a prompt and decode steps are more tokens than the model has positions."""
    longest = config.max_position_embeddings
    if prompt + steps > longest:
        raise ConfigError(
            f"--prompt {prompt} --steps {steps}: expected at most {longest} tokens together, the"
            f" max_position_embeddings of {directory}, found {prompt + steps}; pass fewer"
        )


def check_fed(given: Record, directory: Path, config: ModelConfig) -> None:
    """Refuse, before weights are loaded, tokens that a checkpoint cannot be fed.

    Raises:
        ConfigError: no pass; one of several requests, or one that goes on from a prefix that is in no record; ids or
            positions that the model does not have.
    """
    if not given.passes:
        raise ConfigError(f"{given.file}: expected at least a pass, found none; record the run again")
    end = 0
    for number, each in enumerate(given.passes):
        where = f"{given.file}: line {each.line}"
        if not each.is_one_sequence:
            raise ConfigError(f"{where}: pass {number} is of several requests; record them one at a time")
        start = each.positions[0]
        if start not in (0, end):
            raise ConfigError(
                f"{where}, field 'positions': expected a pass that begins at 0 or goes on at {end}, found one at"
                f" {start}. A record lacks cached prefixes; start the server with --disable-radix-cache and record"
                " again"
            )
        end = start + len(each.ids)
        if end > config.max_position_embeddings:
            raise ConfigError(
                f"{where}, field 'positions': expected positions below {config.max_position_embeddings}, the"
                f" max_position_embeddings of {directory}, found {end - 1}; name the checkpoint that was recorded"
            )
        if max(each.ids) >= config.vocab_size:
            raise ConfigError(
                f"{where}, field 'ids': expected token ids below {config.vocab_size}, the vocab_size of {directory},"
                f" found {max(each.ids)}; name the checkpoint that was recorded"
            )
