"""The errors this package raises on purpose.

Each message names the file, tensor or flag at fault, what was expected, what was found, and what to do.
"""

INTERRUPTED = 130
"""Exit status after Ctrl-C, as shells give it."""
MAX_MESSAGE = 16384
"""Characters of a message. What it quotes of a file is cut where it is quoted; this holds whatever a file says."""


class Nvfp4SglError(RuntimeError):
    """Base of every deliberate error of this package."""

    def __init__(self, message: str = "", *more: object):
        if len(message) > MAX_MESSAGE:
            message = f"{message[:MAX_MESSAGE]}… ({len(message)} characters)"
        super().__init__(message, *more)


class ConfigError(Nvfp4SglError):
    """config.json, or a flag that contradicts it, cannot be served."""


class CheckpointError(Nvfp4SglError):
    """A checkpoint file or tensor is missing, superfluous, malformed or holds invalid values."""


class UnsupportedError(Nvfp4SglError):
    """The surroundings (SGLang's version, a device, an option) are not supported."""


class OperandError(Nvfp4SglError):
    """An argument of an op, kernel or format: the message names it, what was expected and what was found."""


class OperandTypeError(OperandError, TypeError):
    """A wrong dtype, or an argument that is absent where it is needed (or the reverse)."""


class OperandValueError(OperandError, ValueError):
    """A shape, stride, alignment, device or value that is not taken."""
