"""What holds for every test: which of them share a pytest-xdist worker, and which run only when asked for."""

from __future__ import annotations

import gc
import sys
from typing import Any

import pytest

GARBAGE_AFTER = 100_000
"""New objects before garbage is collected; after Python's 700 it takes a third of the time of tests that compile."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="run the exhaustive matrices, too (hours)")
    parser.addoption(
        "--piece", type=_piece, metavar="I/N", help="of the chosen tests, cut into N pieces, the I-th alone"
    )


def _piece(text: str) -> tuple[int, int]:
    """``I/N`` as numbers; ValueError, which argparse reports, unless 1 ≤ I ≤ N."""
    number, pieces = (int(part) for part in text.split("/"))
    if not 1 <= number <= pieces:
        raise ValueError(text)
    return number, pieces


@pytest.hookimpl(trylast=True)  # what -k and -m leave is cut into pieces
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave tests marked ``full`` out unless asked for, and those of other pieces.

    A piece is a run of adjacent tests: those of one function mostly share what is compiled.
    """
    kept = [item for item in items if config.getoption("--full") or not item.get_closest_marker("full")]
    if (piece := config.getoption("--piece")) is not None:
        number, pieces = piece
        kept = kept[len(kept) * (number - 1) // pieces : len(kept) * number // pieces]
    if len(kept) < len(items):
        held = set(kept)
        config.hook.pytest_deselected(items=[item for item in items if item not in held])
        items[:] = kept


def pytest_collection_finish() -> None:
    """Collect garbage less often, and never look through modules and tests, which stay."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(GARBAGE_AFTER)


def pytest_runtest_setup() -> None:
    """Forget what launches of earlier tests were bound with: tests replace constants that it goes by."""
    if (checks := sys.modules.get("nvfp4_sgl.formats.checks")) is not None:
        checks.forget()


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """See ``tests.support.schedule``."""
    from tests.support.schedule import HeaviestFirst

    return HeaviestFirst(config, log)
