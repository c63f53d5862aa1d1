"""What holds for every test: which of them share a pytest-xdist worker, and which run only when asked for."""

from __future__ import annotations

import gc
from typing import Any

import pytest

DEFAULT_SERVER = frozenset(
    f"tests/serving/test_{name}.py"
    for name in (
        *("aborts", "api_chat", "api_completions", "bad_requests", "endpoints", "ends_of_answers"),
        *("examples", "ask_it_page", "fields_served", "generated_requests", "logprobs", "server_info"),
    )
)
"""Files that talk to the same server, started with default flags."""

WATCHED_SERVER = frozenset(f"tests/serving/test_{name}.py" for name in ("metrics", "nan_logits"))
"""Files that talk to the same server, with metrics and a fault that can be armed."""

OWN_SERVERS = frozenset(
    f"tests/serving/test_{name}.py" for name in ("dummy_weights", "logprobs_variants", "process_failures")
)
"""Files of which every test starts a server of its own."""

GARBAGE_AFTER = 100_000
"""New objects before garbage is collected; after Python's 700 it takes a third of the time of tests that compile."""

INDEPENDENT = "tests/triton/"
"""A folder whose tests share nothing but what is compiled for one function: a file may take minutes to interpret."""


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


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Keep a file's tests on one worker, and the files of one server, so that a server or model is built once.

    Tests that start their own servers, the longest of all, go to whichever worker is free.

    pytest-xdist's own groups (``--dist loadgroup``) have no effect with this pytest: 3.8.0 marks a test's group in
    its node id, which pytest 9.2 no longer takes from there.
    """
    from xdist.scheduler import LoadScopeScheduling

    class ByServer(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.split("::", 1)[0]
            if file in OWN_SERVERS:
                return nodeid
            if file.startswith(INDEPENDENT):
                return nodeid.split("[", 1)[0]
            if file in WATCHED_SERVER:
                return "watched server"
            return "default server" if file in DEFAULT_SERVER else file

    return ByServer(config, log)
