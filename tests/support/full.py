"""Cases of a test that run with ``--full`` alone: they repeat, at another size, what cheaper ones show in CI."""

from __future__ import annotations

from typing import Any

import pytest


def full(*cases: Any) -> list[Any]:
    """``cases`` for ``pytest.mark.parametrize``; a tuple is the values of one case, but a named one is a value."""
    return [pytest.param(*(case if type(case) is tuple else (case,)), marks=pytest.mark.full) for case in cases]


def but_for(cases: Any, *few: Any) -> list[Any]:
    """All ``cases``, in their order, of which ``few`` run with ``--full`` alone.

    Raises:
        ValueError: one of ``few`` is none of the cases.
    """
    known = list(cases)
    if strange := [case for case in few if case not in known]:
        raise ValueError(f"expected cases of {known}, found {strange}")
    return [full(case)[0] if case in few else case for case in known]
