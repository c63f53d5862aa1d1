"""Whether a server sums over tensor-parallel ranks by parts that kernels push, and of which passes. Needs no torch."""

from __future__ import annotations

from nvfp4_sgl.errors import ConfigError
from nvfp4_sgl.limits import PUSHING_RANKS
from nvfp4_sgl.switch import value_of

SWITCH = "NVFP4_SGL_PUSHED_SUMS"
"""Environment variable: 1 insists that parts of short passes are pushed, 0 leaves all sums to SGLang's all-reduce.
Unset, they are pushed where that has been measured and nothing stands against it."""
TARGET = "sm_90a"
"""The target whose kernels push."""
RANKS_BY_DEFAULT = (2,)
"""Numbers of ranks that push without being asked. Of four, eight layers alone gained 4 %, but a server lost at one
request (launch/results/flash_tp4_h200.md); eight have not run."""
MAX_PUSHED_TOKENS = 32
"""Tokens of the largest pass whose parts are pushed; a power of two, since kernels' variants change there. On two H200s
a step gained 4 % with 1 request, 2 % with 16 and nothing with 64 or more (launch/results/hopper_step_h200.md)."""


def asked() -> bool | None:
    """The value of :data:`SWITCH`; ``None`` if it is not set.

    Raises:
        ConfigError: it is neither 0 nor 1.
    """
    return value_of(SWITCH)


def check_asked(*, target: str, ranks: int, custom_all_reduce: bool, traces: bool) -> None:
    """Refuse a wrong value of :data:`SWITCH`, and pushed sums that are insisted on where something stands against them.

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
    """:class:`ConfigError` if pushed sums are insisted on and ``target`` has none."""
    if asked() and target != TARGET:
        raise ConfigError(f"{SWITCH}=1: expected a server for {TARGET}, found {target}; unset {SWITCH}, or set it to 0")


def planned(*, target: str, ranks: int, traces: bool = False) -> bool:
    """Whether a server with this environment pushes parts of sums if its GPUs reach each other's memory.

    Args:
        target: of the server. ranks: its ``--tp-size``. traces: whether sublayers' outputs are recorded.

    Raises:
        ConfigError: as :func:`asked`.
    """
    found = asked()
    return target == TARGET and ranks in RANKS_BY_DEFAULT and not traces if found is None else found


def planned_tokens(*, target: str, ranks: int) -> int:
    """Tokens of the largest pass that a :func:`planned` server pushes; 0 if it pushes none.

    Raises:
        ConfigError: as :func:`asked`.
    """
    pushes = target == TARGET and planned(target=target, ranks=ranks)
    return capacity(ranks) if pushes else 0


def describe(*, target: str, ranks: int, traces: bool) -> str:
    """The way in which a planned server that :func:`check_asked` accepts forms its sums, and why.

    Args:
        target, ranks, traces: as of :func:`planned`.

    Raises:
        ConfigError: as :func:`asked`.
    """
    if ranks == 1:
        return "none, with one rank"
    if planned(target=target, ranks=ranks, traces=traces):
        why = f"{SWITCH}=1" if asked() else f"the default of {ranks} ranks whose GPUs reach each other's memory"
        return f"pushed in passes of up to {capacity(ranks)} tokens, else by SGLang's all-reduce: {why}"
    return f"by SGLang's all-reduce: {_why_not(target, ranks, traces)}"


def _why_not(target: str, ranks: int, traces: bool) -> str:
    """The reason for which such ranks push nothing."""
    if target != TARGET:
        return f"kernels of {TARGET} alone push, found {target}"
    if ranks not in PUSHING_RANKS:
        return f"2, 4 or 8 ranks can push, found {ranks}"
    if asked() is False:
        return f"{SWITCH}=0"
    return "NVFP4_SGL_TRACE is set" if traces else f"the default of {ranks} ranks; {SWITCH}=1 has them push"


def capacity(ranks: int) -> int:
    """Tokens of the largest pass whose parts are pushed; 0 if so many ranks push none."""
    return MAX_PUSHED_TOKENS if ranks in PUSHING_RANKS else 0
