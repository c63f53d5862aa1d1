"""Hooks around SGLang's own reading, resolution and checks of arguments: one message instead of a traceback.

SGLang asserts in many places which arguments it takes together. For our model what it says becomes one error of this
package; for other models nothing changes.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from typing import Any

from nvfp4_sgl.errors import ConfigError, Nvfp4SglError
from nvfp4_sgl.serving.arguments import is_our_checkpoint
from nvfp4_sgl.serving.flags.values import check_value

MODEL_FLAGS = ("--model-path", "--model")
LEVEL_FLAGS = ("--log-level",)


def prepare(original: Callable[..., Any], argv: Sequence[str]) -> Any:
    """Hook around SGLang's reading of the command line, which sets up logs before anything is checked."""
    model, level = (value_of(argv, names) for names in (MODEL_FLAGS, LEVEL_FLAGS))
    if level is not None and is_our_checkpoint(model):
        check_value("log_level", level)
    return _said_once(lambda: original(argv), model)


def resolve(original: Callable[..., Any], server_args: Any) -> Any:
    """Hook around SGLang's resolution of arguments, and around its checks afterwards."""
    return _said_once(lambda: original(server_args), server_args.model_path)


def value_of(argv: Sequence[str], names: Sequence[str]) -> str | None:
    """The last value that a command line gives to one of the flags ``names``; ``None`` if it gives none."""
    given = None
    for index, argument in enumerate(argv):
        name, has_value, value = argument.partition("=")
        if name in names:
            given = value if has_value else next(iter(argv[index + 1 :]), None)
    return given


def _said_once(call: Callable[[], Any], model: str | None) -> Any:
    try:
        return call()
    except Nvfp4SglError:
        raise
    except Exception as error:
        if not is_our_checkpoint(model):
            raise
        raise ConfigError(
            f"SGLang does not take these arguments: {what(error)}; correct or leave out the flag that this names"
        ) from error


def what(error: Exception) -> str:
    """The text of an error, and where it was raised if it has none."""
    text = " ".join(str(error).split())
    last = traceback.extract_tb(error.__traceback__)[-1]
    return text or f"{type(error).__name__} at {last.filename}:{last.lineno}: {last.line}"
