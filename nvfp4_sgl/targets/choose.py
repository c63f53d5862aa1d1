"""The choice of a target (:mod:`.target` describes them) and of what it runs.

:func:`choose` returns the boundaries of a target in a mode; the decoder is built from them, and ``doctor``, the log and
``/server_info`` print them. A target is complete or absent: no boundary falls back to another target's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from nvfp4_sgl.errors import UnsupportedError
from nvfp4_sgl.ops.modes import ActivationMode
from nvfp4_sgl.targets.target import MODES, TARGETS, Target, descriptor

__all__ = ["MODES", "Choice", "Target", "choose", "detect_target", "mode_of"]

if TYPE_CHECKING:
    from nvfp4_sgl.model.contract import Boundaries


@dataclass(frozen=True)
class Choice:
    """What a target runs.

    Attributes:
        mode: what may enter GEMMs with quantised weights.
        boundaries: the implementation of each.
        modes: :data:`MODES` of the target.
        dtypes: values of ``--dtype``. kv_cache_dtypes: values of ``--kv-cache-dtype``.
        note: how far the implementation is from what the target should do, or how it is known; empty if neither.
    """

    target: Target
    mode: ActivationMode
    boundaries: Boundaries
    modes: tuple[ActivationMode, ...]
    dtypes: tuple[str, ...]
    kv_cache_dtypes: tuple[str, ...]
    note: str = ""


def mode_of(target: Target, name: str | None) -> ActivationMode:
    """The mode of that ``name``, the target's default if ``None``.

    Raises:
        UnsupportedError: the target has no such mode.
    """
    known = [mode.value for mode in MODES[target]]
    if name is not None and name not in known:
        raise UnsupportedError(f"activation_mode {name!r}: on {target.value} expected one of {', '.join(known)}")
    return MODES[target][0] if name is None else ActivationMode(name)


def choose(target: Target, mode: ActivationMode | None = None) -> Choice:
    """What runs on ``target`` in ``mode``, the target's default unless given.

    Raises:
        UnsupportedError: the target has no such mode.
    """
    mode = mode_of(target, None if mode is None else mode.value)
    found = descriptor(target, mode)
    return Choice(target, mode, found.boundaries(), MODES[target], found.dtypes, found.kv_cache_dtypes, found.note)


def detect_target() -> Target:
    """The target of this machine: the CUDA device's architecture if there is one, else the CPU."""
    import torch

    if not torch.cuda.is_available():
        return Target.CPU
    capability = torch.cuda.get_device_capability()
    known = {number: each.target for each in TARGETS for number in each.capabilities}
    if capability not in known:
        raise UnsupportedError(
            f"CUDA device {torch.cuda.get_device_name()} has compute capability {capability[0]}.{capability[1]};"
            " expected 9.0 (Hopper), 10.0 or 10.3 (Blackwell data centre), or no CUDA device for the CPU path"
        )
    return known[capability]
