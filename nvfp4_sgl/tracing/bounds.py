"""Default of ``--bound`` of ``layertest`` and ``trace``: the largest error that roundings explain."""

from __future__ import annotations

from collections.abc import Iterable

from nvfp4_sgl.ops.modes import ActivationMode

BOUNDS = {ActivationMode.W4A16: 0.03, ActivationMode.W4A4: 0.3}
"""Error that roundings explain where inputs are equal: of bf16; of activations in FP4, whose codes flip."""
OF_A_RUN = 3
"""Factor of the bound where inputs carry the errors of earlier layers, too.

Between ``w4a16`` and ``w4a4`` random checkpoints of ``nvfp4-sgl tiny`` reach 0.6 to 0.8 in five layers. Between fp32
and bf16 with packed rows they reach 0.1 after four layers and 0.4 after twenty.
"""


def default_bound(modes: Iterable[ActivationMode], *, of_a_run: bool) -> float:
    """The bound for what was computed in ``modes``: the coarsest of them counts.

    Args:
        of_a_run: whether errors of earlier layers are in it, as in records of whole passes.
    """
    return round(max(BOUNDS[mode] for mode in modes) * (OF_A_RUN if of_a_run else 1), 6)
