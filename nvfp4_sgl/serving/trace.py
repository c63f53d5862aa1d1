"""Recording of a server's passes, which environment variables ask for."""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch

from nvfp4_sgl.errors import ConfigError
from nvfp4_sgl.model.decoder import Decoder
from nvfp4_sgl.serving.sglang import parallel, settings
from nvfp4_sgl.tracing.asked import TRACE, is_traced
from nvfp4_sgl.tracing.contents import FORMAT
from nvfp4_sgl.tracing.record import Recorder

TRACE_PASSES = "NVFP4_SGL_TRACE_PASSES"
"""How many passes are recorded, from the first."""
DEFAULT_PASSES = 32
MAX_HEADER_BYTES = 2**16
"""More than a record's first line has."""


def check_trace() -> None:
    """Refuse, before weights are loaded, what cannot be recorded.

    Raises:
        ConfigError: CUDA graphs are on, whose replays no tap sees; the number of passes is none; the file holds passes
            or something else already, or cannot be made.
    """
    if not is_traced():
        return
    _passes()
    if torch.cuda.is_available() and not settings.has_no_graphs():
        raise ConfigError(
            f"{TRACE}: passes in CUDA graphs cannot be recorded; add --disable-cuda-graph, or unset {TRACE}"
        )
    file = _file()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("a+b") as opened:
            opened.seek(0)
            first, more = opened.readline(MAX_HEADER_BYTES), opened.read(1)
    except OSError as error:
        raise ConfigError(f"{TRACE}: {file} cannot be written ({error.strerror}); name another folder") from error
    # A start that failed has left a file without a pass: empty, or with the first line alone.
    if more or (first and not _is_header(first)):
        raise ConfigError(f"{TRACE}: {file} holds a record, or is none of ours; name another folder")


def _is_header(line: bytes) -> bool:
    """Whether ``line`` is the first one of a record."""
    try:
        found = json.loads(line)
    except ValueError:
        return False
    return isinstance(found, dict) and found.get("format") == FORMAT


def recorder(decoder: Decoder, target: str, mode: str) -> Recorder | None:
    """The recorder of this rank's passes; ``None`` if nothing is recorded."""
    if not is_traced():
        return None
    about = {"target": target, "mode": mode, "rank": parallel.tp_rank(), "ranks": parallel.tp_size()}
    return Recorder(decoder, _file(), _passes(), about)


def _file() -> Path:
    return Path(os.environ[TRACE]) / f"rank{parallel.tp_rank()}.jsonl"


def _passes() -> int:
    given = os.environ.get(TRACE_PASSES, str(DEFAULT_PASSES))
    if not given.isdecimal() or not int(given):
        raise ConfigError(f"{TRACE_PASSES}: expected a number from 1, found {given!r}")
    return int(given)
