"""Ends a process of SGLang for this package: one message, one exit code.

Only the standard library is imported at module level: it must work where the rest of the package is broken.
"""

from __future__ import annotations

import sys
import traceback
from typing import NoReturn

DISABLE_VARIABLE = "NVFP4_SGL_DISABLE"
"""Environment variable; a value other than empty or 0 switches the package off."""

EXIT_CODE = 78
"""Exit code of a process that this package stopped on purpose (``EX_CONFIG``)."""


def stop(error: BaseException) -> NoReturn:
    """Print ``error`` as one message and end this process with :data:`EXIT_CODE`."""
    print(describe(error), file=sys.stderr, flush=True)
    raise SystemExit(EXIT_CODE)


def describe(error: BaseException) -> str:
    """One message for ``error``: ours as they are, others with where they were raised and how to go on without us."""
    try:
        from nvfp4_sgl import errors, files

        if isinstance(error, errors.Nvfp4SglError):
            return files.escaped(f"nvfp4-sgl: error: {error}")
    except Exception:  # the package itself is broken; say what we know
        pass
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return (
        f"nvfp4-sgl: error: the plugin failed to load: {type(error).__name__}: {error}{where}."
        f" Repair the installation, or set {DISABLE_VARIABLE}=1 to run SGLang without this package."
    )
