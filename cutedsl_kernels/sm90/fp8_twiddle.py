"""Order of eight E4M3 codes in two 32-bit words, so that eight instructions turn them into four registers of two bf16.

A bf16 whose bits 15 and 10 to 4 are a code's sign and its exponent and mantissa, and whose other bits are 0, is the
code's value times 2^-120, subnormals included. So a register of two bf16 is a rotation of a word and a mask
(``FP8_PAIR_MASK``), if the codes' bits lie where the rotation finds them. The eight bits of a code cannot tile a word:
no two rotations of its mask are disjoint. But rotations by 0, 4, 8 and 12 cover every bit exactly twice. So the first
word holds a register rotated by 4, the second one rotated by 12, and what both leave over is the other two: one whose
bytes a byte permutation gathers and rotates at once, and one that needs no rotation.
"""

from __future__ import annotations

FP8_PAIR_MASK = 0x87F087F0
"""Sign, exponent and mantissa of two E4M3 codes in a register of two bf16."""
FIRST_LEFT, SECOND_LEFT, BYTES_LEFT = 4, 12, 8
"""Rotations to the left by which the first word's own register is found, the second's, and the one of both's bytes."""
FIRST_BYTES, SECOND_BYTES = 0xF000F000, 0x00870087
"""Where either word holds the register that is rotated by whole bytes: the first in its odd ones, the second in even
ones."""
BYTES_SELECTED = 0x6143
"""``prmt``'s selection of these bytes of (first, second), rotated by BYTES_LEFT."""
FIRST_REST, SECOND_REST = 0x07800780, 0x80708070
"""Where either word holds the register that is not rotated."""
