"""Rules for the values of stored tensors: one for each kind, in a table that all readers share.

A rule takes a tensor, or the part of it that was read, and returns where it holds what it must not (bool, of the same
shape, or ``None`` if any value may be there) and, in words, what was expected. It does not wait for the device.

Bounds are there so that no value of a file makes a NaN, and so that values of another byte order are seen. With every
tensor at its bound at once, what a sublayer adds to the streams stays far below the largest number of fp32.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from torch import Tensor

Rule: TypeAlias = "Callable[[Tensor], tuple[Tensor | None, str]]"

LARGEST = 2.0**16
"""Largest magnitude of a value, stored plainly or behind a scale; trained ones are smaller by orders of magnitude."""
TINY = 2.0**-64
"""No training leaves many values closer to zero than this, but at zero; byte-swapped ones are: 1.0 becomes 4.6e-41."""
TINY_SHARE = 8
"""One value in so many of a row may be as small as that."""
GLOBAL_SCALE_MIN, GLOBAL_SCALE_MAX = 2.0**-76, 2.0**8
"""Times 448 and 6 the largest is 2^19.4, and the smallest just below :data:`TINY`. Exporters give a matrix's largest
magnitude / 2688, or a power of two near it."""


def arithmetic() -> Any:
    """:mod:`.arithmetic`, with torch, which takes seconds to import; headers are checked without."""
    from nvfp4_sgl.checkpoint import arithmetic

    return arithmetic


def anything(part: Tensor) -> tuple[Tensor | None, str]:
    """Packed codes: every byte means something."""
    return None, ""


def finite(part: Tensor) -> tuple[Tensor | None, str]:
    """BF16 or F32 values of draft layers, which are not computed with."""
    return ~part.isfinite(), "finite values"


def plain(part: Tensor) -> tuple[Tensor | None, str]:
    """BF16 or F32 values that are computed with: bounded, and not almost zero in a large part of a row."""
    expected = f"finite values of at most {LARGEST:g}, of which few are between 0 and 2^-64"
    return _misplaced(part, LARGEST), expected


def fp32_scales(part: Tensor) -> tuple[Tensor | None, str]:
    """Scales of FP8 blocks in BF16 or F32, which a code of 448 multiplies; a block of zeros may have scale 0."""
    bad, expected = _misplaced(part, LARGEST / 512), f"finite scales >= 0 of at most {LARGEST / 512:g}, few below 2^-64"
    negative = part < 0
    return (negative if bad is None else bad | negative), expected


def _misplaced(part: Tensor, largest: float) -> Tensor | None:
    """A mask of magnitudes beyond ``largest`` or NaN, or of a row with too many tiny ones; ``None`` if there are none.

    Magnitudes are compared as integers, by the bits without the sign: their order is the same, and NaN comes last.
    """
    torch = arithmetic().torch
    integers = torch.int16 if part.itemsize == 2 else torch.int32
    mask = torch.iinfo(integers).max
    low, high = (_bits(bound) >> 32 - 8 * part.itemsize for bound in (TINY, largest))
    size = part.view(integers) & mask
    if size.device.type == "cpu" and size.numel() and size.amax().item() <= high:
        below = size.sub_(1).bitwise_and_(mask)  # zero becomes the largest
        if below.amin().item() >= low - 1:
            return None
        size = part.view(integers) & mask
    tiny = (size > 0) & (size < low)
    if tiny.dim():
        tiny &= tiny.sum(dim=-1, keepdim=True) * TINY_SHARE > tiny.shape[-1]
    return tiny | (size > high)


def _bits(value: float) -> int:
    """The bits of an fp32 number > 0; its upper half is its bf16 number's."""
    return int.from_bytes(struct.pack("<f", value), "little")


def e4m3_values(part: Tensor) -> tuple[Tensor | None, str]:
    """E4M3 weights, which have no infinity."""
    torch = arithmetic().torch
    return (part.view(torch.uint8) & 0x7F) == 0x7F, "no NaN"


def e4m3_scales(part: Tensor) -> tuple[Tensor | None, str]:
    """NVFP4 block scales: no sign, no NaN, not all zero."""
    torch = arithmetic().torch
    bits = part.view(torch.uint8)
    return (bits >= 0x7F) | (bits.amax() == 0), "block scales that are numbers >= +0, of which one at least is > 0"


def mxfp4_scales(part: Tensor) -> tuple[Tensor | None, str]:
    """UE8M0 scales of codes up to 6."""
    return _power_scales(part, 13)


def fp8_power_scales(part: Tensor) -> tuple[Tensor | None, str]:
    """UE8M0 scales of codes up to 448."""
    return _power_scales(part, 7)


def _power_scales(part: Tensor, highest: int) -> tuple[Tensor | None, str]:
    """Small ones belong to blocks of zeros; byte 255 is NaN."""
    torch = arithmetic().torch
    return part.view(
        torch.uint8
    ) > 127 + highest, f"UE8M0 scales of at most 2^{highest} (byte {127 + highest}), no NaN scale"


ZERO_MATRIX_SCALES = (2.0**-117, 2.0**-100 / 2688)
"""Global scales that ``nvfp4-sgl convert`` gives to matrices of zeros: of MXFP4, and of others (rounded to fp32)."""


def global_scale(part: Tensor) -> tuple[Tensor | None, str]:
    """Scalar that multiplies."""
    torch = arithmetic().torch
    good = (part >= GLOBAL_SCALE_MIN) & (part <= GLOBAL_SCALE_MAX)
    for scale in ZERO_MATRIX_SCALES:
        good |= part == torch.tensor(scale, dtype=torch.float32, device="cpu").item()
    return ~good, "a scale > 0 from 2^-76 to 2^8, or 2^-117 or 2^-100/2688 for a matrix of zeros"


def inverse_global_scale(part: Tensor) -> tuple[Tensor | None, str]:
    """Scalar that divides: the reciprocal of a :func:`global_scale`."""
    low, high = 1 / GLOBAL_SCALE_MAX, 1 / GLOBAL_SCALE_MIN
    return ~((part >= low) & (part <= high)), "an inverse scale > 0 from 2^-8 to 2^76"


@dataclass(frozen=True)
class TensorClass:
    """Tensors that share one rule.

    Attributes:
        pattern: of their names; none for parts of matrices, whose storage says their rule.
        words: what the rule demands, for docs/checkpoints.md. reason: why.
    """

    title: str
    pattern: re.Pattern[str] | None
    rule: Rule
    words: str
    reason: str


_PLAIN = "magnitude at most 2^16; in a row at most one in 8 between 0 and 2^-64"


def _plain(title: str, pattern: str, reason: str) -> TensorClass:
    return TensorClass(title, re.compile(pattern), plain, _PLAIN, reason)


CLASSES: tuple[TensorClass, ...] = (
    _plain("norms", r"(.*\.)?\w*norm\.weight", "trained to about 1; a value after a norm is at most √d times it"),
    _plain("embedding, head", r"(embed|head)\.weight", "logits are sums over d of weights times normalised values"),
    _plain("router", r".*\.gate\.weight", "scores are sums over d, of which a square root of softplus is taken"),
    _plain("router bias", r".*\.gate\.bias", "only chooses among scores"),
    _plain("index weights", r".*\.weights_proj\.weight", "index scores are sums over heads"),
    _plain("hyper-connection matrices", r"(.*\.)?hc_\w+_fn", "mixes are sums over hc_mult · d of normalised values"),
    _plain("hyper-connection bases", r"(.*\.)?hc_\w+_base", "are added before a sigmoid and a softmax"),
    _plain("hyper-connection scales", r"(.*\.)?hc_\w+_scale", "multiply mixes before a sigmoid and a softmax"),
    _plain("sinks", r".*\.attn_sink", "are logits of a softmax, which is taken over its maximum"),
    _plain("compressor biases", r".*\.ape", "are logits of a softmax, which is taken over its maximum"),
    TensorClass(
        "BF16 and F32 matrices", None, plain, _PLAIN, "two matrices follow each other without a norm: o_a, o_b"
    ),
    TensorClass("E4M3 weights", None, e4m3_values, "no NaN", "the scales bound them"),
    TensorClass(
        "E4M3 block scales",
        None,
        e4m3_scales,
        "from +0 to 448, not all 0",
        "a sign or only zeros come from no exporter",
    ),
    TensorClass(
        "global scales",
        None,
        global_scale,
        "from 2^-76 to 2^8, or what a matrix of zeros is given",
        "exporters give a matrix's largest magnitude / 2688",
    ),
    TensorClass(
        "inverse global scales", None, inverse_global_scale, "from 2^-8 to 2^76", "the reciprocal of a global scale"
    ),
    TensorClass("UE8M0 scales of MXFP4", None, mxfp4_scales, "at most 2^13", "6 · 2^13 is less than 2^16"),
    TensorClass("UE8M0 scales of FP8", None, fp8_power_scales, "at most 2^7", "448 · 2^7 is less than 2^16"),
    TensorClass(
        "F32 and BF16 scales of FP8",
        None,
        fp32_scales,
        "from 0 to 2^7; in a row at most one in 8 between 0 and 2^-64",
        "448 · 2^7 is less than 2^16",
    ),
    TensorClass("packed codes", None, anything, "any byte", "the scales bound them"),
)
"""All that is read but ids of experts, which are from 0 to below ``n_routed_experts``."""


def rule_of(name: str) -> Rule:
    """The rule of a tensor of floating point that is no part of a matrix; drafts have some of their own."""
    found = (one.rule for one in CLASSES if one.pattern is not None and one.pattern.fullmatch(name))
    return next(found, finite)


def table() -> str:
    """The table as docs/checkpoints.md prints it."""
    rows = ["| tensors | what their values may be | why |", "| --- | --- | --- |"]
    return "\n".join(rows + [f"| {one.title} | {one.words} | {one.reason} |" for one in CLASSES])
