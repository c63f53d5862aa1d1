"""Caches of kernels for tests that compile ahead."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from nvfp4_sgl.targets.fused import compile_ahead
from nvfp4_sgl.triton_kernels import ahead
from tests.support.compiled_kernels import SMALLEST_KERNEL, run_here


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiles in this process, for tests of what is compiled, rather than where."""
    monkeypatch.setattr(compile_ahead, "_run", run_here)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One that holds :data:`SMALLEST_KERNEL`; to be copied."""
    folder = tmp_path_factory.mktemp("library")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "user"))
        patch.setattr(compile_ahead, "_run", run_here)
        compile_ahead.compile_missing([SMALLEST_KERNEL], [], folder / "library", 90)
    return folder / "library"


@pytest.fixture
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Empty caches: Triton's folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    with ahead.cached_in(tmp_path / "triton"):
        yield tmp_path / "triton"
