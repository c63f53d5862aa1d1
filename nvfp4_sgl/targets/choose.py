"""The one place that decides what runs where.

:func:`choose` returns the boundaries of a target in a mode; the decoder is built from them, and ``doctor``, the log and
``/server_info`` print them. A target is complete or absent: no boundary falls back to another target's.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nvfp4_sgl.errors import UnsupportedError
from nvfp4_sgl.ops.modes import ActivationMode

if TYPE_CHECKING:
    from nvfp4_sgl.model.contract import Boundaries


class Target(enum.Enum):
    """What the kernels are built for."""

    CPU = "cpu"
    SM90 = "sm_90a"
    SM100 = "sm_100a"


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


MODES: Mapping[Target, tuple[ActivationMode, ...]] = {
    Target.CPU: (ActivationMode.W4A16, ActivationMode.W4A4),
    Target.SM90: (ActivationMode.W4A16, ActivationMode.W4A4),
    Target.SM100: (ActivationMode.W4A4,),
}
"""What may enter GEMMs with quantised weights; the first is the default."""

HOPPER_NOTES = {
    ActivationMode.W4A16: "matrices that are not NVFP4 are dequantised to bf16 at load, with one routed expert all"
    " experts of its layer; but not FP8 ones with UE8M0 scales, with which servers of tiny models have run on an H200",
    ActivationMode.W4A4: "activations are rounded to NVFP4 and MXFP8 as on SM100 and multiplied in bf16, for accuracy"
    " and not for speed; servers of tiny models have run so on an H200",
}


def mode_of(target: Target, name: str | None) -> ActivationMode:
    """The mode of that ``name``, the target's default if ``None``.

    Raises:
        UnsupportedError: the target has no such mode.
    """
    known = [mode.value for mode in MODES[target]]
    if name is not None and name not in known:
        raise UnsupportedError(f"activation_mode {name!r}: on {target.value} expected one of {', '.join(known)}")
    return MODES[target][0] if name is None else ActivationMode(name)


def multiplies_as_sm100(target: Target, mode: ActivationMode) -> bool:
    """Whether a target's GEMMs are SM100's, by merges and groups and by the storages that they take."""
    return target is Target.SM100 or (target is Target.SM90 and mode is ActivationMode.W4A4)


def _cpu(mode: ActivationMode) -> Choice:
    from nvfp4_sgl.targets import reference

    return Choice(
        Target.CPU,
        mode,
        reference.boundaries(),
        MODES[Target.CPU],
        ("auto", "float32", "float", "bfloat16"),
        ("auto", "bfloat16", "fp8_e4m3"),
    )


def _sm90(mode: ActivationMode) -> Choice:
    from nvfp4_sgl.targets import fused

    return Choice(
        Target.SM90,
        mode,
        fused.w4a4_on_hopper_boundaries() if mode is ActivationMode.W4A4 else fused.w4a16_boundaries(),
        MODES[Target.SM90],
        ("auto", "bfloat16"),
        ("auto", "fp8_e4m3"),
        HOPPER_NOTES[mode],
    )


def _sm100(mode: ActivationMode) -> Choice:
    from nvfp4_sgl.targets import fused

    return Choice(
        Target.SM100,
        mode,
        fused.sm100_boundaries(),
        MODES[Target.SM100],
        ("auto", "bfloat16"),
        ("auto", "fp8_e4m3"),
        "executed in an emulator only, never yet on a Blackwell GPU: run launch/check_gpu first",
    )


_CHOICES: dict[Target, Callable[[ActivationMode], Choice]] = {
    Target.CPU: _cpu,
    Target.SM90: _sm90,
    Target.SM100: _sm100,
}


def choose(target: Target, mode: ActivationMode | None = None) -> Choice:
    """What runs on ``target`` in ``mode``, the target's default unless given.

    Raises:
        UnsupportedError: the target has no such mode.
    """
    return _CHOICES[target](mode_of(target, None if mode is None else mode.value))


def detect_target() -> Target:
    """The target of this machine: the CUDA device's architecture if there is one, else the CPU."""
    import torch

    if not torch.cuda.is_available():
        return Target.CPU
    capability = torch.cuda.get_device_capability()
    known = {(9, 0): Target.SM90, (10, 0): Target.SM100, (10, 3): Target.SM100}
    if capability not in known:
        raise UnsupportedError(
            f"CUDA device {torch.cuda.get_device_name()} has compute capability {capability[0]}.{capability[1]};"
            " expected 9.0 (Hopper), 10.0 or 10.3 (Blackwell data centre), or no CUDA device for the CPU path"
        )
    return known[capability]
