"""Rotary position embedding over the trailing dimensions of a head, in interleaved pairs (specification §3.2)."""

from __future__ import annotations

import math
from collections.abc import MutableMapping

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from nvfp4_sgl.ops.norm import rms_norm
from nvfp4_sgl.rope_fields import YarnConfig


def inverse_frequencies(rope_dim: int, base: float, yarn: YarnConfig | None = None) -> Tensor:
    """Frequency of each of the ``rope_dim / 2`` pairs, fp32 [rope_dim/2], radians per position.

    Plain: ``1 / base**(2i/rope_dim)``, evaluated in fp32 in exactly this order (``base**-x`` differs by up to
    1e-4 in the cosine at position 5000). With YaRN (arXiv 2309.00071, NTK-by-parts): dimensions that turn
    fewer than ``beta_slow`` times over the original context are divided by ``factor``, those that turn more
    than ``beta_fast`` times are kept, in between is a linear ramp. DeepSeek-V4 applies no attention factor.
    """
    exponents = torch.arange(0, rope_dim, 2, dtype=torch.float32) / rope_dim
    frequencies = 1.0 / (base**exponents)
    if yarn is None:
        return frequencies

    def dimension_of(rotations: float) -> float:
        wavelength = yarn.original_max_position_embeddings / (rotations * 2 * math.pi)
        return rope_dim * math.log(wavelength) / (2 * math.log(base))

    low = max(math.floor(dimension_of(yarn.beta_fast)), 0)
    high = min(math.ceil(dimension_of(yarn.beta_slow)), rope_dim - 1)
    ramp = (torch.arange(rope_dim // 2, dtype=torch.float32) - low) / max(high - low, 1e-3)
    ramp = ramp.clamp(0, 1)
    return frequencies / yarn.factor * ramp + frequencies * (1 - ramp)


_TURNS: MutableMapping[Tensor, list[tuple[int, Tensor, Tensor]]] = WeakTensorKeyDictionary()


def _turns(positions: Tensor, frequencies: Tensor) -> Tensor:
    """``cos + i sin`` of every angle, complex64 [T, rope_dim/2].

    Kept as long as ``positions`` lives and is unchanged, since every layer of a pass asks for the same. Entries hold
    their frequencies, so that another tensor at the same address is never taken for them. Inference tensors do not
    tell whether they changed; nothing is kept for them.
    """
    entries = [] if positions.is_inference() else _TURNS.setdefault(positions, [])
    version = 0 if positions.is_inference() else positions._version
    for known_version, known, turns in entries:
        if known is frequencies and known_version == version:
            return turns
    angles = positions.float()[:, None] * frequencies
    turns = torch.complex(angles.cos(), angles.sin())
    entries.append((version, frequencies, turns))
    return turns


def _rotate(x: Tensor, positions: Tensor, frequencies: Tensor, inverse: bool) -> Tensor:
    """Rotate the tail of ``x`` [T, ..., n] (fp32) by ``positions`` [T], in place; returns ``x``.

    A pair (a, b) as a + ib times cos + i sin is the rotation of section 3.2.
    """
    pairs = torch.view_as_complex(x[..., -2 * frequencies.numel() :].unflatten(-1, (-1, 2)))
    turns = _turns(positions, frequencies)
    pairs *= (turns.conj() if inverse else turns).view(x.shape[0], *([1] * (x.dim() - 2)), -1)
    return x


def apply_rope(x: Tensor, positions: Tensor, frequencies: Tensor, *, inverse: bool = False) -> Tensor:
    """Rotate the last ``2 * frequencies.numel()`` dimensions of ``x`` by its position.

    Pair ``i`` is dimensions ``(2i, 2i+1)`` of the tail; its angle is ``fp32(position) * frequencies[i]``, one
    fp32 product, as the model was trained (an fp64 angle is a different model: 1.2e-2 in the cosine at
    position 1,048,575).

    Args:
        x: [T, ..., n], any floating dtype.
        positions: [T], integer, absolute, 0-based.
        frequencies: fp32 [rope_dim/2] from :func:`inverse_frequencies`.
        inverse: rotate back (the conjugate); used on the attention output at the query's position.

    Rounding: rotation in fp32, one rounding to ``x.dtype``.
    """
    return _rotate(x.to(torch.float32, copy=True), positions, frequencies, inverse).to(x.dtype)


def rms_norm_rope(
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    positions: Tensor,
    frequencies: Tensor,
    *,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """:func:`rms_norm` over the last dimension, then :func:`apply_rope` (specification §3.1).

    Queries use it per head with no weight; keys use it with ``kv_norm``.

    Args:
        x: [T, ..., n].
        weight: [n] or ``None``.
        positions, frequencies: as in :func:`apply_rope`.
        out_dtype: ``x.dtype`` unless given (keys keep fp32 up to the cache write).

    Rounding: everything in fp32, one rounding at the end.
    """
    normed = rms_norm(x, weight, eps, out_dtype=torch.float32)
    return _rotate(normed, positions, frequencies, inverse=False).to(out_dtype or x.dtype)
