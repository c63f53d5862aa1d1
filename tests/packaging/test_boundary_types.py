"""What passes between a target's boundaries has one type for each of the contract's type parameters.

Modules are called through torch's ``__call__``, which has no types; so this reads what their ``forward`` declares.
"""

from __future__ import annotations

import functools
from typing import Any, get_args, get_type_hints

import pytest

from nvfp4_sgl.targets import fused, reference

DECLARED: dict[str, tuple[Any, Any]] = {
    "cpu": (reference.boundaries(), get_type_hints(reference.boundaries)["return"]),
    "gpu": (fused.sm100_boundaries(), fused.FusedBoundaries),
}


def hints(boundary: Any, method: str = "forward") -> dict[str, Any]:
    built = boundary.func if isinstance(boundary, functools.partial) else boundary
    return get_type_hints(getattr(built, method))


@pytest.mark.parametrize("target", DECLARED)
def test_boundaries_agree(target: str) -> None:
    given, declared = DECLARED[target]
    step, mix, entries, routes, _ = get_args(declared)
    assert hints(given.plan, "plan")["return"] is step
    for method in ("enter", "advance"):
        assert hints(given.site, method)["step"] in (step, object)
        assert get_args(hints(given.site, method)["return"])[-1] is mix
    assert hints(given.site, "advance")["mix"] is hints(given.site, "leave")["mix"] is mix
    for boundary in (given.prepare_attention, given.select, given.attend, given.route, given.experts):
        assert hints(boundary)["step"] is step, boundary
    assert hints(given.select)["return"] == entries
    assert hints(given.attend)["entries"] == entries | None
    assert hints(given.route)["return"] is hints(given.experts)["routes"] is routes
