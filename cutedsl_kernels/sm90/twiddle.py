"""Order of 16 E2M1 codes in two 32-bit words, so that 16 instructions turn them into eight registers of two bf16 each.

A bf16 whose bits 15, 8, 7, 6 are a code's sign, exponent and mantissa and whose other bits are 0 is the code's value
times 2^-126, subnormals included. So a register of two bf16 is a rotation of a word and a mask (``PAIR_MASK``), if
the codes' bits lie where the rotation finds them. The four bits of a code cannot tile a word: no four rotations of
bits 6, 7, 8, 15 cover 16 bits without overlap. Three fit, and leave four bits over. Two words leave eight, which
together are two more rotations of a third word, made of both by one bitwise selection.

Registers are numbered 0 to 7: the four of one wgmma's A fragment, then the four of the next.
"""

from __future__ import annotations

PAIR_MASK = 0x81C081C0
"""Sign, exponent and mantissa of two E2M1 codes in a register of two bf16."""
FIRST = ((0, 0), (1, 6), (2, 12))
"""Registers that come from the first word: (register, rotation to the left)."""
SECOND = ((4, 2), (5, 8), (6, 14))
"""Registers that come from the second word, likewise."""
JOINED = ((3, 4), (7, 10))
"""Registers that come from the first word's bits of ``FIRST_REST`` and the second's elsewhere."""
FIRST_REST = 0x60306030
"""What the first word's own registers leave of it."""
SECOND_REST = 0x180C180C
"""What the second word's own registers leave of it."""
VALUE_EXPONENT = -126
"""A masked register holds the codes' values times two to this power."""
