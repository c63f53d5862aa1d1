"""The numbers that a call hands to a compiled kernel: the same flat list for every architecture, shape and epilogue."""

from __future__ import annotations

from typing import NamedTuple


class Arguments(NamedTuple):
    """Arguments of a compiled kernel, in the order of ``Entry.__call__`` (entry.py), without the stream.

    Addresses of what a kernel does not have are 0. Strides are in elements, those of block scales in bytes.
    """

    weights: int
    weight_scales: int
    tokens: int
    token_scales: int
    out: int
    out_scales: int
    row_scale: int
    row_weight: int
    alpha: int
    offsets: int
    counts: int
    sources: int
    workspace: int
    features: int
    k: int
    rows: int
    groups: int
    clusters: int
    token_row: int
    token_group: int
    token_scale_row: int
    token_scale_group: int
    out_row: int
    out_group: int
    row_scale_row: int
    row_scale_group: int
    alpha_feature: int
    alpha_group: int
    out_scale_row: int

    @property
    def sizes(self) -> tuple[int, ...]:
        """The arguments that are no addresses: sizes and strides."""
        return self[len(ADDRESSES) :]


ADDRESSES = Arguments._fields[: Arguments._fields.index("features")]
"""The arguments that are addresses, by the names of a call's tensors; they come first."""
