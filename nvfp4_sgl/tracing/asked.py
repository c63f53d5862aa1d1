"""Whether the environment asks for a record of a server's passes. Imports no torch."""

import os

TRACE = "NVFP4_SGL_TRACE"
"""Folder for records, one file a rank; unset or empty: nothing is recorded."""


def is_traced() -> bool:
    """Whether the environment asks for a record of passes."""
    return bool(os.environ.get(TRACE))
