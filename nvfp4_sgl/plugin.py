"""SGLang's entry points: the platform (:func:`activate`) and the general plugin (:func:`register`).

SGLang loads both in each of its processes and swallows every exception that they raise; it would then serve its own
DeepSeek-V4 instead of ours. So whatever fails here prints one error and ends the process.

``NVFP4_SGL_DISABLE=1`` switches the package off: nothing is registered, and SGLang behaves as if the package were
not installed.

Only what needs nothing but the standard library is imported at module level, so that importing this module cannot fail.
"""

from __future__ import annotations

import os

from nvfp4_sgl.process_exit import DISABLE_VARIABLE, stop


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
        from nvfp4_sgl.serving import probe, start_log

        probe.hide_kernel_folders()
        start_log.leave_out_import_warnings()
        if _has_accelerator() or os.environ.get("SGLANG_USE_CPU_ENGINE", "0") == "1":
            return None
        from nvfp4_sgl.serving.sglang.ledger import require_supported_version

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


def _has_accelerator() -> bool:
    import torch

    if torch.cuda.is_available() or torch.xpu.is_available():
        return True
    other = (getattr(torch, name, None) for name in ("npu", "musa", "hpu", "mps"))
    return any(module is not None and module.is_available() for module in other)
