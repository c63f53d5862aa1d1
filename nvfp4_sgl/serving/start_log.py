"""Drops lines of SGLang's log that are false for our model.

A closed list, by the logger and by how the message begins. Everything else stays, and so does each of them for other
models. An argument's value that is in none of the log's lines is in ``/server_info``.
"""

from __future__ import annotations

import itertools
import logging
import sys
import warnings
from pathlib import Path

import torch

from nvfp4_sgl.architectures import is_served
from nvfp4_sgl.config import read_config_json
from nvfp4_sgl.errors import ConfigError
from nvfp4_sgl.serving.sglang.log_lines import IMPORT_WARNINGS, LEFT_OUT, LEFT_OUT_ON_CPU

ALL_LEFT_OUT = LEFT_OUT | LEFT_OUT_ON_CPU
"""No logger is in both."""


def leave_out_false_lines() -> None:
    """Drop :data:`LEFT_OUT` in this process, without a GPU :data:`LEFT_OUT_ON_CPU`, too.

    Call where the model is known to be ours.
    """
    for name in LEFT_OUT if torch.cuda.is_available() else ALL_LEFT_OUT:
        target = logging.getLogger(name)
        target.removeFilter(_holds)
        target.addFilter(_holds)


def _holds(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(tuple(ALL_LEFT_OUT[record.name]))


def leave_out_import_warnings(command: list[str] | None = None) -> None:
    """Drop :data:`IMPORT_WARNINGS` if the command line, which child processes inherit, names a checkpoint of ours.

    They come before any argument is parsed.
    """
    if _names_our_checkpoint(sys.argv if command is None else command):
        for start in IMPORT_WARNINGS.values():
            warnings.filterwarnings("ignore", message=start)


def _names_our_checkpoint(command: list[str]) -> bool:
    words = [part for word in command for part in word.split("=", 1)]
    paths = [path for word, path in itertools.pairwise(words) if word in ("--model-path", "--model")]
    try:
        return (
            bool(paths)
            and (Path(paths[-1]) / "config.json").is_file()
            and is_served(read_config_json(paths[-1]).get("architectures"))
        )
    except (ConfigError, OSError):
        return False  # the pre-flight says what is wrong
