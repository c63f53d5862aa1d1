"""Kernels that the tests keep on disk: the same code, made anew when a source changes."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import pytest

from nvfp4_sgl.cutedsl_kernels import library
from nvfp4_sgl.cutedsl_kernels.compiled import KernelKey
from nvfp4_sgl.cutedsl_kernels.sm100.epilogue import Epilogue
from nvfp4_sgl.cutedsl_kernels.sm100.shape import KernelShape
from tests.sm100.emulator import Compiled
from tests.sm100.support import entries, kernel_cache
from tests.sm100.support.products import ProductCase

CASE = ProductCase(KernelShape(8), tokens=5, features=136, k=192)
KEY = KernelKey("sm_100a", CASE.shape)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return kernel_cache.cache_folder()


def compiling_fails(key: KernelKey) -> Compiled:
    raise AssertionError(f"{key} is compiled again")


def test_a_kernel_is_compiled_once(folder: Path) -> None:
    first = kernel_cache.cached(KEY, entries._compile)
    second = kernel_cache.cached(KEY, compiling_fails)
    assert second.ptx == first.ptx
    for compiled in (first, second):
        CASE.check(compiled=compiled)
    (entry,) = folder.iterdir()
    assert entry == kernel_cache.entry_of(KEY)


def test_what_a_kernel_is_made_from_names_its_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def name(key: KernelKey = KEY) -> str:
        return kernel_cache.entry_of(key).name

    entry = name()
    assert name(KernelKey("sm_103a", CASE.shape)) != entry
    sources = shutil.copytree(library.SOURCES, tmp_path / "kernels")
    monkeypatch.setattr(library, "SOURCES", sources)
    assert name() == entry
    for edited, same in (("sm100/cost.py", True), ("sm100/epilogue.py", False), ("common/split.py", False)):
        with (sources / edited).open("a") as handle:
            handle.write("\n")
        assert (name() == entry) == same, edited


def test_kernels_of_sources_that_were_edited_since_are_not_shared(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their code is not what the sources on disk make."""
    monkeypatch.setattr(kernel_cache, "LOADED", {})
    CASE.check(compiled=kernel_cache.cached(KEY, entries._compile))
    assert not folder.exists() or not list(folder.iterdir())


def test_an_entry_made_of_other_sources_is_made_again(folder: Path) -> None:
    first = kernel_cache.cached(KEY, entries._compile)
    manifest = kernel_cache.entry_of(KEY) / library.MANIFEST
    manifest.write_text(manifest.read_text().replace('"sources": "', '"sources": "0'))
    assert kernel_cache.cached(KEY, entries._compile).ptx == first.ptx


def test_an_unused_entry_goes(folder: Path) -> None:
    old, new = folder / "old", folder / "new"
    for entry in (old, new):
        entry.mkdir(parents=True)
    long_ago = time.time() - (kernel_cache.KEPT_DAYS + 1) * 24 * 3600
    os.utime(old, (long_ago, long_ago))
    kernel_cache._prune(folder)
    assert list(folder.iterdir()) == [new]


def test_an_epilogue_that_no_key_has() -> None:
    with pytest.raises(ValueError, match="expected the row scale None"):
        entries.compile_entry(CASE.shape, Epilogue(row_scale_constant=1.0))
