"""``/update_weights_from_disk`` in the front end: parse the request, and check everything before any request waits.

SGLang's own flow follows: new requests wait, running ones finish with the weights that they began with, and the
schedulers are asked to replace theirs (:mod:`.update_weights`).
"""

from __future__ import annotations

import asyncio
import io
import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from nvfp4_sgl.checkpoint.interchange import differences
from nvfp4_sgl.checkpoint.scan import scan
from nvfp4_sgl.checkpoint.stored_files import ReadFiles
from nvfp4_sgl.checkpoint.sweep import available_cores
from nvfp4_sgl.checkpoint.verified import Verified
from nvfp4_sgl.errors import CheckpointError, ConfigError, Nvfp4SglError, UnsupportedError
from nvfp4_sgl.serving import arguments
from nvfp4_sgl.serving.requests import serves_our_model
from nvfp4_sgl.serving.sglang import settings

logger = logging.getLogger(__name__)

HONOURED: Mapping[str, tuple[Any, ...] | None] = {
    "abort_all_requests": None,
    "flush_cache": (True,),
    "load_format": (None, "auto", "safetensors"),
    "model_path": None,
    "weight_version": None,
    # off, as SGLang has them unless they are given
    "is_async": (False,),
    "keep_pause": (False,),
    "manifest": (None,),
    "recapture_cuda_graph": (False,),
    "token_step": (0,),
    "torch_empty_cache": (False,),
}
"""Fields of the request and the values that are taken; ``None``: any. HTTP's are checked before, by a table of fields
(:mod:`.fields.administrative`)."""

DRAFT_UPDATED = "cpu"
"""``--device``, as resolved, of servers whose draft is replaced with the model."""

SHOWN = 8
"""Findings that an answer lists at most."""

BUSY = "requests are still running"
"""What a scheduler answers that has not finished every request, such as one whose client has just hung up."""

BUSY_SECONDS, BUSY_PERIOD = 30.0, 0.1
"""For how long, and how often, a scheduler that is busy is asked again."""

_updating = threading.Lock()
"""Held while an update is being checked or made."""

Answer = tuple[bool, str, int]


async def update_weights(original: Callable[..., Any], manager: Any, asked: Any, request: Any = None) -> Answer:
    """Hook around SGLang's update: success, message, and how many requests were paused (none: they wait or finish)."""
    if not serves_our_model():
        answer: Answer = await original(manager, asked, request)
        return answer
    if not _updating.acquire(blocking=False):
        return False, "another update of weights is under way; wait for its answer", 0
    try:
        check_fields(asked, await _names(request))
        asked.model_path = str(Path(asked.model_path).absolute())
        await asyncio.to_thread(check_checkpoint, asked.model_path)
        # Here, since it may have changed while files were read.
        if manager.is_pause:
            raise UnsupportedError("generation is paused: expected /continue_generation before an update of weights")
        name = manager.served_model_name
        success, message, paused = await original(manager, asked, request)
        if success and settings.given_arguments(manager.server_args)["served_model_name"] is not None:
            manager.served_model_name = name
        return success, message, paused
    except (Nvfp4SglError, OSError) as error:
        logger.warning("nvfp4_sgl: update of weights refused: %s", error)
        return False, str(error), 0
    finally:
        _updating.release()


async def dispatch_update(original: Callable[..., Any], manager: Any, asked: Any) -> Answer:
    """Hook around SGLang's message to the schedulers, sent while new requests wait: again while they are busy."""
    deadline = time.monotonic() + BUSY_SECONDS
    while True:
        success, message, paused = await original(manager, asked)
        if success or message != BUSY or time.monotonic() >= deadline:
            return success, message, paused
        await asyncio.sleep(BUSY_PERIOD)


async def _names(request: Any) -> Collection[str]:
    """Fields that the client sent; none if it is no HTTP client."""
    if request is None:
        return ()
    body = await request.json()
    return list(body) if isinstance(body, dict) else ()


def check_fields(asked: Any, names: Collection[str] = ()) -> None:
    """Refuse what is not honoured.

    Args:
        asked: SGLang's ``UpdateWeightFromDiskReqInput``.
        names: fields that were sent, known to SGLang or not.

    Raises:
        UnsupportedError: a field or a value is not honoured; names it.
        ConfigError: ``model_path`` is no path.
    """
    for name in names:
        if name not in HONOURED:
            raise UnsupportedError(f"{name}: not honoured by an update of weights; leave it out")
    for name, allowed in HONOURED.items():
        value = getattr(asked, name)
        if allowed is not None and not any(
            value is one or (value == one and type(value) is type(one)) for one in allowed
        ):
            raise UnsupportedError(f"{name}: found {value!r:.80}, expected {_either(allowed)}; leave it out")
    if not isinstance(asked.model_path, str) or not asked.model_path or "\0" in asked.model_path:
        raise ConfigError(f"model_path: found {asked.model_path!r:.80}, expected a directory")


def _either(allowed: tuple[Any, ...]) -> str:
    return " or ".join(repr(value) for value in allowed)


def check_checkpoint(directory: str | Path) -> Verified:
    """Check files, names, shapes and values of ``directory``, and that its weights fit the model that is served.

    Raises:
        ConfigError, CheckpointError: as :func:`nvfp4_sgl.checkpoint.verified.verify`; or tensors hold what
            ``nvfp4-sgl inspect --values`` calls a problem.
        UnsupportedError: the model that is served, or that of the directory, does not allow it.
    """
    started = time.monotonic()
    found = arguments.served(directory, None, arguments.resolved_overrides())
    check_fits(arguments.verified_at_start(), found)
    check_tokenizer(found.inventory.directory)
    # Half of the cores: requests are being served meanwhile. Not mapped: a file that is cut short must not end them.
    how: Any = {"threads": max(1, available_cores() // 2), "progress": io.StringIO()}
    problems = scan(found, files=ReadFiles(), **how).problems
    if settings.draft_algorithm() is not None:
        problems += scan(found, files=ReadFiles(), draft=found.draft(), **how).problems
    if problems:
        raise CheckpointError(f"{directory}: {listed([problem.message for problem in problems])}")
    logger.info("nvfp4_sgl: update: %s verified, %.1f s", directory, time.monotonic() - started)
    return found


def check_fits(served: Verified, found: Verified) -> None:
    """UnsupportedError unless ``found`` differs from ``served`` in values alone, its draft's included where one is
    served; names what else differs."""
    algorithm, device = settings.draft_algorithm(), settings.resolved("device")
    if algorithm is not None and device != DRAFT_UPDATED:
        raise UnsupportedError(
            f"update of weights with --speculative-algorithm {algorithm} on {device}: not implemented; restart the"
            " server"
        )
    if served.is_dummy:
        raise UnsupportedError("the server has random weights (--load-format dummy): restart it with a checkpoint")
    if other := differences(served, found, arguments.resolved_overrides(), drafted=algorithm is not None):
        raise UnsupportedError(
            f"{found.inventory.directory}: not the model that is served: {listed(other)}; expected other values"
            " alone: start a second server for it"
        )


def check_tokenizer(directory: Path) -> None:
    """UnsupportedError if ``directory`` has a tokenizer other than the one that the server has read."""
    file, served = directory / "tokenizer.json", Path(settings.resolved("tokenizer_path")) / "tokenizer.json"
    if not file.is_file() or not served.is_file() or served.samefile(file):
        return
    if file.read_bytes() != served.read_bytes():
        raise UnsupportedError(f"{file}: differs from {served}, which stays in use; start a second server for it")


def listed(lines: list[str]) -> str:
    """The first of ``lines``, and how many more there are."""
    more = f"; and {len(lines) - SHOWN} more" if len(lines) > SHOWN else ""
    return "; ".join(lines[:SHOWN]) + more
