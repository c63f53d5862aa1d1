"""What holds for every test: which of them share a pytest-xdist worker."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep a file's tests on one worker, so that its server or model is built once.

    A test with its own ``pytest.mark.xdist_group`` keeps that: files that share a server name one group.
    """
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(Path(item.path).stem))
