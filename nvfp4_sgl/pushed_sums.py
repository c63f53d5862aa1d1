"""Whether a server sums over tensor-parallel ranks by parts that kernels push, and of which passes. Needs no torch."""

from __future__ import annotations

import os

from nvfp4_sgl.errors import ConfigError
from nvfp4_sgl.limits import PUSHING_RANKS

SWITCH = "NVFP4_SGL_PUSHED_SUMS"
"""Environment variable: 1 pushes parts of short passes, 0 leaves all sums to SGLang's all-reduce, as if unset."""
TARGET = "sm_90a"
"""The target whose kernels push."""
SENT_BYTES = 2**22
"""Most bytes that a rank sends at a time: 512 tokens of 4096 values to one other rank. Every rank sends its whole part
to every other; a collective in two steps moves less from some size on. Which size is best has not been measured."""


def asked() -> bool:
    """Whether :data:`SWITCH` is set.

    Raises:
        ConfigError: it is neither 0 nor 1.
    """
    given = os.environ.get(SWITCH, "")
    if given not in ("", "0", "1"):
        raise ConfigError(f"{SWITCH}: expected 0 or 1, found {given!r}; correct it, or unset it")
    return given == "1"


def check_asked(*, target: str, ranks: int, custom_all_reduce: bool, traces: bool) -> None:
    """Refuse a wrong value of :data:`SWITCH`, and pushed sums that something stands against.

    Args:
        target: of the server. ranks: its ``--tp-size``.
        custom_all_reduce: whether SGLang's own all-reduce is allowed, which reaches other GPUs' memory in the same way.
        traces: whether sublayers' outputs are recorded.

    Raises:
        ConfigError: as it says.
    """
    if not asked():
        return
    check_target(target)
    found = None
    if ranks not in PUSHING_RANKS:
        found = f"--tp-size 2, 4 or 8, found {ranks}"
    elif not custom_all_reduce:
        found = "GPUs that reach each other's memory, found --disable-custom-all-reduce"
    elif traces:
        found = "no record of passes, whose outputs would be sums, found NVFP4_SGL_TRACE"
    if found is not None:
        raise ConfigError(f"{SWITCH}=1: expected {found}; unset {SWITCH}, or set it to 0")


def check_target(target: str) -> None:
    """:class:`ConfigError` if pushed sums are asked for and ``target`` has none."""
    if asked() and target != TARGET:
        raise ConfigError(f"{SWITCH}=1: expected a server for {TARGET}, found {target}; unset {SWITCH}, or set it to 0")


def capacity(ranks: int, d: int) -> int:
    """Tokens of the largest pass whose parts of ``d`` bf16 values are pushed: a power of two; 0 if none are.

    A power of two, since kernels' variants change there.
    """
    tokens = SENT_BYTES // (2 * d * (ranks - 1)) if ranks in PUSHING_RANKS else 0
    return 1 << tokens.bit_length() - 1 if tokens else 0
