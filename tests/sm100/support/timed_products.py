"""Products of the SM100 kernels with modelled time."""

from __future__ import annotations

from dataclasses import replace

from nvfp4_sgl.cutedsl_kernels.sm100.shape import KernelShape
from tests.sm100.emulator import Options, Timeline, TimingModel
from tests.sm100.support.products import ExpertCase, ProductCase, run


def timeline(
    shape: KernelShape, features: int, k: int, tokens: int, model: TimingModel | None = None,
    options: Options | None = None,
) -> Timeline:  # fmt: skip
    """The times of one persistent cluster that does all tiles of a product, or of one expert with a grouped shape."""
    model = replace(model or TimingModel(), warps_sharing=4.0 * shape.teams)
    options = replace(options or Options(), timing=model)
    if shape.grouped:
        case = ExpertCase(shape, (tokens,), features, k)
        return run(case.build()[0], case.epilogue(shape.output), options).timelines[0]
    return run(*ProductCase(shape, tokens, features, k).build(), options).timelines[0]
