"""The measured cases of each kernel family: one module a family, whose ``cases()`` yields :class:`Case` at real
shapes."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True)
class Peer:
    """Another implementation of a case's op, on tensors of its own.

    Attributes:
        run: the op; may be captured in a CUDA graph and replayed.
        error: relative error of its results against ours, asked for once, after both ran. A plain callable instead of
            a ``Peer`` is not compared.
        limit: errors beyond it, or NaN, mean that it computes something else: it is not timed.
        part: it does a part of the job, or sets a mark, so being faster means nothing.
    """

    run: Callable[[], object]
    error: Callable[[], float] | None = None
    limit: float = 0.01
    part: bool = False


def one_after_the_other(first: Mapping[str, Peer], second: Mapping[str, Peer]) -> dict[str, Peer]:
    """Peers that each do a part of a case: every pair of them, with the larger of their errors."""

    def pair(a: Peer, b: Peer) -> Peer:
        def run() -> None:
            a.run()
            b.run()

        def error() -> float:
            return max(peer.error() for peer in (a, b) if peer.error)

        return Peer(run, error if a.error or b.error else None, max(a.limit, b.limit), a.part or b.part)

    return {f"{name}, {other}": pair(a, b) for name, a in first.items() for other, b in second.items()}


@dataclass(frozen=True)
class Case:
    """One op at one shape, its tensors already on the device.

    Attributes:
        name: op, model and shape, for example ``quantize/flash/8192x4096``; the shape begins with the tokens.
        run: the op; may be captured in a CUDA graph and replayed.
        bytes: the floor of bytes moved: inputs read once and outputs written once.
        flops: floating-point operations of its bf16 GEMMs, and half of those in FP8; 0 for ops without.
        peers: other implementations of the same op, by name.
    """

    name: str
    run: Callable[[], object]
    bytes: int
    flops: int = 0
    peers: Mapping[str, Peer | Callable[[], object]] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        """Tokens of the shape, or 0 for a name that does not say."""
        found = re.match(r"\d+", self.name.rsplit("/", 1)[-1])
        return int(found[0]) if found else 0


def relative_error(theirs: Tensor, ours: Tensor) -> float:
    """Norm of the difference over ours; both as fp32, NaN wherever either has one."""
    difference = (theirs.float() - ours.float()).norm()
    return float(difference / ours.float().norm().clamp(min=1e-30))
