"""Recording of a server's passes, which environment variables ask for."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from nvfp4_sgl.errors import ConfigError
from nvfp4_sgl.model.decoder import Decoder
from nvfp4_sgl.serving import sglang_private as private
from nvfp4_sgl.tracing.record import Recorder

TRACE = "NVFP4_SGL_TRACE"
"""Folder for records, one file a rank; unset or empty: nothing is recorded."""
TRACE_PASSES = "NVFP4_SGL_TRACE_PASSES"
"""How many passes are recorded, from the first."""
DEFAULT_PASSES = 32


def check_trace() -> None:
    """Refuse, before weights are loaded, what cannot be recorded.

    Raises:
        ConfigError: CUDA graphs are on, whose replays no tap sees; the number of passes is none; the file is there
            already, or cannot be made.
    """
    if not os.environ.get(TRACE):
        return
    _passes()
    if torch.cuda.is_available() and not private.has_no_graphs():
        raise ConfigError(
            f"{TRACE}: passes in CUDA graphs cannot be recorded; add --disable-cuda-graph, or unset {TRACE}"
        )
    file = _file()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch(exist_ok=False)
    except FileExistsError as error:
        raise ConfigError(f"{TRACE}: {file} holds a record, or is none of ours; name another folder") from error
    except OSError as error:
        raise ConfigError(f"{TRACE}: {file} cannot be written ({error.strerror}); name another folder") from error


def recorder(decoder: Decoder, target: str, mode: str) -> Recorder | None:
    """What records this rank's passes; ``None`` if nothing is to be recorded."""
    if not os.environ.get(TRACE):
        return None
    about = {"target": target, "mode": mode, "rank": private.tp_rank(), "ranks": private.tp_size()}
    return Recorder(decoder, _file(), _passes(), about)


def _file() -> Path:
    return Path(os.environ[TRACE]) / f"rank{private.tp_rank()}.jsonl"


def _passes() -> int:
    given = os.environ.get(TRACE_PASSES, str(DEFAULT_PASSES))
    if not given.isdecimal() or not int(given):
        raise ConfigError(f"{TRACE_PASSES}: expected a number from 1, found {given!r}")
    return int(given)
