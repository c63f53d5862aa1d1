"""The stages of a server's start, a line each in the log, with the seconds that they took.

``config``, ``memory``, ``weights``, ``warm-up``, ``boundaries`` (what implements each) and ``ready``, in this order,
each on the first rank alone. What SGLang says between them that does not hold for our model is left out
(:func:`leave_out_false_warnings`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

from nvfp4_sgl.serving import sglang_private as private

logger = logging.getLogger(__name__)

FALSE_WARNINGS = {
    "sglang.srt.model_executor.model_runner_components.load_model_utils": "Using FP8 KV cache but no scaling factors",
}
"""How messages begin that are wrong for our model, by SGLang's logger: packed entries carry a scale for each 64 values
themselves, and have no factors beside them."""

_started = time.monotonic()


def begin() -> None:
    """Count the seconds of ``ready`` from now."""
    global _started
    _started = time.monotonic()


@contextmanager
def stage(name: str) -> Iterator[list[str]]:
    """Time what is inside, and log it if it does not raise; append to the list what else the line shall say."""
    words: list[str] = []
    before = time.monotonic()
    yield words
    say(name, *words, f"{time.monotonic() - before:.1f} s")


def ready(*words: str) -> None:
    """Log the last line: ``words``, and the seconds since :func:`begin`."""
    say("ready", *words, f"{time.monotonic() - _started:.1f} s since the start of this process")


def say(name: str, *words: str) -> None:
    """Log a line of the start."""
    if private.tp_rank() == 0:
        logger.info("nvfp4_sgl: %s: %s", name, ", ".join(words))


def leave_out_false_warnings() -> None:
    """Drop :data:`FALSE_WARNINGS` in this process; call where the model is known to be ours."""
    for name in FALSE_WARNINGS:
        target = logging.getLogger(name)
        target.removeFilter(_is_true)
        target.addFilter(_is_true)


def _is_true(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(FALSE_WARNINGS[record.name])
