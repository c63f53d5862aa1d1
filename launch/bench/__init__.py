"""What to measure of each kernel family: one module a family, whose ``cases()`` yields :class:`Case` at real shapes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Case:
    """One op at one shape, its tensors already on the device.

    Attributes:
        name: op and shape, for example ``quantize/flash/8192x4096``.
        run: the op; may be captured in a CUDA graph and replayed.
        bytes: the floor of bytes moved: inputs read once and outputs written once.
        flops: floating-point operations that matter to a floor; 0 for ops bound by memory.
        peers: other implementations of the same op, by name.
    """

    name: str
    run: Callable[[], object]
    bytes: int
    flops: int = 0
    peers: Mapping[str, Callable[[], object]] = field(default_factory=dict)
