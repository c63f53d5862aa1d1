"""The errors of compiling, finding and launching kernels; those of arguments are in ``nvfp4_sgl.errors``."""

from __future__ import annotations

from nvfp4_sgl.errors import Nvfp4SglError


class ArchitectureError(Nvfp4SglError):
    """The tensors are on a device that these kernels do not run on."""


class LibraryError(Nvfp4SglError):
    """A library of compiled kernels is missing, stale, foreign or lacks a kernel."""


class WorkspaceError(Nvfp4SglError):
    """A kernel needs a workspace that is not there, too small, or must not be made now."""


class LaunchError(Nvfp4SglError):
    """CUDA refused to load or launch a kernel."""
