"""Installs hooks into functions of SGLang."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from nvfp4_sgl.errors import UnsupportedError
from nvfp4_sgl.serving.sglang.hooked import HOOKS
from nvfp4_sgl.serving.sglang.ledger import find
from nvfp4_sgl.serving.sglang.private import VERSION


def install_hooks(around: dict[str, Callable[..., Any]]) -> None:
    """Wrap the functions named by keys of :data:`.hooked.HOOKS`: ``hook(original, *args, **kwargs)``.

    SGLang logs and ignores a hook that it cannot apply; this raises :class:`UnsupportedError`.
    """
    find("hook_logger").setLevel(logging.WARNING)  # else a line for each hook, among those of the start
    registry, kind = find("HookRegistry"), find("HookType").AROUND
    for name, hook in around.items():
        registry.register(HOOKS[name].path, hook, kind)
    registry.apply_hooks()
    failed = [HOOKS[name].path for name in around if HOOKS[name].path not in registry._patched]
    if failed:
        raise UnsupportedError(
            f"SGLang {VERSION} refused hooks on {', '.join(failed)}; the log above says why."
            f" Reinstall it unmodified: pip install --force-reinstall --no-deps 'sglang=={VERSION}'"
        )
