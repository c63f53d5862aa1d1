"""All cases, by name."""

from __future__ import annotations

import functools

from tests.sm100.hardware import (
    atomic_cases,
    barrier_cases,
    cluster_cases,
    copy_cases,
    dependent_cases,
    matrix_cases,
    memory_cases,
    pipeline_cases,
    reduce_cases,
    scalar_cases,
    tma_cases,
    warp_cases,
    warpgroup_cases,
)
from tests.sm100.hardware.case import Case

MODULES = (
    scalar_cases,
    warp_cases,
    matrix_cases,
    memory_cases,
    atomic_cases,
    barrier_cases,
    copy_cases,
    tma_cases,
    reduce_cases,
    pipeline_cases,
    cluster_cases,
    dependent_cases,
    warpgroup_cases,
)


@functools.cache
def catalogue() -> dict[str, Case]:
    """Every case; importing CuTeDSL takes seconds."""
    found = [case for module in MODULES for case in module.cases()]
    names = {case.name: case for case in found}
    if len(names) != len(found):
        raise ValueError("two cases of one name")
    return names
