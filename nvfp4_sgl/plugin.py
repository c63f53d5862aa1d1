"""SGLang's entry points: the platform (:func:`activate`) and the general plugin (:func:`register`).

SGLang loads both in each of its processes and swallows every exception that they raise; it would then serve its own
DeepSeek-V4 instead of ours. So whatever fails here prints one error and ends the process.

``NVFP4_SGL_DISABLE=1`` switches the package off: nothing is registered, and SGLang behaves as if the package were
not installed.

Only the standard library is imported at module level, so that importing this module cannot fail.
"""

from __future__ import annotations

import os
import sys
import traceback
from typing import NoReturn

DISABLE_VARIABLE = "NVFP4_SGL_DISABLE"
"""Environment variable; a value other than empty or 0 switches the package off."""

EXIT_CODE = 78
"""Exit code of a process that this package stopped on purpose (``EX_CONFIG``)."""


def is_disabled() -> bool:
    """Whether the package is switched off by :data:`DISABLE_VARIABLE`."""
    return os.environ.get(DISABLE_VARIABLE, "") not in ("", "0")


def activate() -> str | None:
    """Entry point of the group ``sglang.srt.platforms``: our CPU platform where no accelerator exists.

    Returns:
        The platform class as ``module:name``, or ``None`` where SGLang's own platform serves.
    """
    if is_disabled():
        return None
    try:
        from nvfp4_sgl.serving.probe import hide_kernel_folders
        from nvfp4_sgl.serving.start_log import leave_out_import_warnings

        hide_kernel_folders()
        leave_out_import_warnings()
        if _has_accelerator() or os.environ.get("SGLANG_USE_CPU_ENGINE", "0") == "1":
            return None
        from nvfp4_sgl.serving.sglang_private import require_supported_version

        require_supported_version()
        from nvfp4_sgl.serving.platform import CpuReferencePlatform

        return f"{CpuReferencePlatform.__module__}:{CpuReferencePlatform.__name__}"
    except Exception as error:
        stop(error)


def register() -> None:
    """Entry point of the group ``sglang.srt.plugins``: model class, attention backend, argument hooks, pools."""
    if is_disabled():
        return
    try:
        from nvfp4_sgl.serving.registration import register_all

        register_all()
    except Exception as error:
        stop(error)


def stop(error: BaseException) -> NoReturn:
    """Print ``error`` as one message and end this process with :data:`EXIT_CODE`."""
    print(describe(error), file=sys.stderr, flush=True)
    raise SystemExit(EXIT_CODE)


def describe(error: BaseException) -> str:
    """One message for ``error``: ours as they are, others with where they were raised and how to go on without us."""
    try:
        from nvfp4_sgl.errors import Nvfp4SglError

        if isinstance(error, Nvfp4SglError):
            from nvfp4_sgl.files import escaped

            return escaped(f"nvfp4-sgl: error: {error}")
    except Exception:  # the package itself is broken; say what we know
        pass
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return (
        f"nvfp4-sgl: error: the plugin failed to load: {type(error).__name__}: {error}{where}."
        f" Repair the installation, or set {DISABLE_VARIABLE}=1 to run SGLang without this package."
    )


def _has_accelerator() -> bool:
    import torch

    if torch.cuda.is_available() or torch.xpu.is_available():
        return True
    other = (getattr(torch, name, None) for name in ("npu", "musa", "hpu", "mps"))
    return any(module is not None and module.is_available() for module in other)
