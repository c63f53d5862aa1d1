"""What the emulator raises. Each message says what was found and where; nothing is only warned about."""

from __future__ import annotations


class EmulatorError(Exception):
    """Base of all; the launch adds CTA, warp, lane set and the instruction's text to the message."""


class UnsupportedError(EmulatorError):
    """PTX, a descriptor field or a host call that is not modelled. Extend the emulator, do not skip it."""


class MemoryFaultError(EmulatorError):
    """An access outside its allocation, misaligned, or a write to what was declared read-only."""


class HazardError(EmulatorError):
    """A race or a rule of the programming model broken: uninitialised reads, over-arrived barriers, …"""


class DeadlockError(EmulatorError):
    """No warp and no engine can go on; the message lists who waits for what."""
