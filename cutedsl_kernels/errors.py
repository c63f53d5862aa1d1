"""The errors that the kernels raise on purpose: each names the argument, what was expected and what was found."""


class KernelError(Exception):
    """Base of every deliberate error of this folder."""


class OperandTypeError(KernelError, TypeError):
    """An argument has the wrong dtype, or is absent where it is needed (or the reverse)."""


class OperandValueError(KernelError, ValueError):
    """An argument has a shape, stride, alignment, device or size that no kernel takes."""


class ArchitectureError(KernelError, RuntimeError):
    """The tensors are on a device whose architecture these kernels do not run on."""


class LibraryError(KernelError, RuntimeError):
    """A library of compiled kernels is missing, stale, foreign or lacks a kernel."""


class LaunchError(KernelError, RuntimeError):
    """CUDA refused to load or launch a kernel."""
