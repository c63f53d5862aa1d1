"""The numbers that a call hands to a compiled kernel: the same flat list for every architecture, shape and epilogue."""

from __future__ import annotations

from typing import NamedTuple


class Arguments(NamedTuple):
    """Arguments of a compiled kernel, in the order of ``Entry.__call__`` (entry.py), without the stream.

    Addresses of what a kernel does not have are 0. Strides are in elements, those of block scales in bytes. Copies have
    the strides of ``out``.
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
    copy_0: int
    copy_1: int
    copy_2: int
    copy_3: int
    copy_4: int
    copy_5: int
    copy_6: int
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

    @property
    def copies(self) -> tuple[int, ...]:
        """The addresses of copies, those that a kernel does not have included."""
        return tuple(getattr(self, name) for name in COPIES)


ADDRESSES = Arguments._fields[: Arguments._fields.index("features")]
"""The arguments that are addresses, by the names of a call's tensors; they come first."""
COPIES = tuple(name for name in ADDRESSES if name.startswith("copy_"))
"""Those of tensors that get the same values as ``out``."""
