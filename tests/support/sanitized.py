"""Which shapes of Hopper's GEMMs run under compute-sanitizer, too."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from nvfp4_sgl.cutedsl_kernels.sm90.shape import KernelShape


def one_of_each_sanitized(shapes: Sequence[KernelShape], sanitized: Iterable[tuple[int, int]]) -> list[Any]:
    """All ``shapes`` as parameters of a test; the first with each token tile and split of K is marked ``sanitized``.

    Raises:
        ValueError: no shape has such a tile and split.
    """
    kinds = [(shape.token_tile, shape.split_k) for shape in shapes]
    marked = {kinds.index(kind) for kind in sanitized}
    return [
        pytest.param(shape, marks=[pytest.mark.sanitized] * (place in marked)) for place, shape in enumerate(shapes)
    ]
