"""The choice of a target (:mod:`.target` describes them) and of what it runs.

:func:`choose` returns the boundaries of a target in a mode; the decoder is built from them, and ``doctor``, the log and
``/server_info`` print them. A target is complete or absent: no boundary falls back to another target's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from nvfp4_sgl.errors import UnsupportedError
from nvfp4_sgl.ops.modes import ActivationMode
from nvfp4_sgl.targets.target import CPU, descriptor, modes, targets

if TYPE_CHECKING:
    from nvfp4_sgl.model.contract import AnyBoundaries


@dataclass(frozen=True)
class Choice:
    """The chosen target, mode and boundaries.

    Attributes:
        target: its word.
        mode: what may enter GEMMs with quantised weights.
        boundaries: the implementation of each.
        modes: all that may enter GEMMs on the targets of that word.
        dtypes: values of ``--dtype``. kv_cache_dtypes: values of ``--kv-cache-dtype``.
        note: how far the implementation is from what the target should do, or how it is known; empty if neither.
    """

    target: str
    mode: ActivationMode
    boundaries: AnyBoundaries
    modes: tuple[ActivationMode, ...]
    dtypes: tuple[str, ...]
    kv_cache_dtypes: tuple[str, ...]
    note: str = ""


def mode_of(target: str, name: str | None) -> ActivationMode:
    """The mode of that ``name``, the target's default if ``None``.

    Raises:
        UnsupportedError: the target has no such mode.
    """
    known = {mode.value: mode for mode in modes(target)}
    if name is not None and name not in known:
        raise UnsupportedError(f"activation_mode {name!r}: on {target} expected one of {', '.join(known)}")
    return descriptor(target).modes[0] if name is None else known[name]


def choose(target: str, mode: ActivationMode | None = None) -> Choice:
    """Everything that runs on ``target``, a word of ``--target``, in ``mode``, the target's default unless given.

    Raises:
        UnsupportedError: there is no such target, or it has no such mode.
    """
    found = descriptor(target, mode)
    chosen = mode or found.modes[0]
    return Choice(target, chosen, found.boundaries(), modes(target), found.dtypes, found.kv_cache_dtypes, found.note)


def detect_target() -> str:
    """The word of this machine's target: by the CUDA device's architecture if there is one, else the CPU's."""
    import torch

    if not torch.cuda.is_available():
        return CPU.word
    capability = torch.cuda.get_device_capability()
    known = {number: each.word for each in targets() for number in each.capabilities}
    if capability not in known:
        expected = ", ".join(f"{major}.{minor} ({word})" for (major, minor), word in sorted(known.items()))
        raise UnsupportedError(
            f"CUDA device {torch.cuda.get_device_name()} has compute capability {capability[0]}.{capability[1]};"
            f" expected {expected}, or no CUDA device for the CPU path"
        )
    return known[capability]
