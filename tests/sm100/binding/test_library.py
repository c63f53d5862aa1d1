"""Kernels compiled ahead of time: built, loaded in a fresh process, run there, refused when they do not fit."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nvfp4_sgl.cutedsl_kernels import library
from nvfp4_sgl.cutedsl_kernels.common.clusters import B200_CLUSTERS
from nvfp4_sgl.cutedsl_kernels.compiled import KernelCache, KernelKey
from nvfp4_sgl.cutedsl_kernels.errors import LibraryError
from nvfp4_sgl.cutedsl_kernels.library import LIBRARY, MANIFEST, Library, export, link
from nvfp4_sgl.cutedsl_kernels.plan import plan_gemm, token_tile_for
from nvfp4_sgl.cutedsl_kernels.sm100.shape import KernelShape
from tests.packaging.checkout import ROOT
from tests.sm100.emulator.host import runtime_library
from tests.sm100.support.library_process import SHAPE

rows, features, k = SHAPE
KEYS = [
    KernelKey("sm_100a", plan_gemm(features, k, rows, 1, token_tile_for(rows), "fp32", B200_CLUSTERS)),
    KernelKey("sm_103a", KernelShape(8, gated=True, grouped=True, output="nvfp4"), 10.0),
]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, objects = tmp_path_factory.mktemp("library"), tmp_path_factory.mktemp("objects")
    runtime_library()
    link({key: export(key, objects) for key in KEYS}, objects, folder)
    return folder


def load(folder: Path) -> Library:
    return Library(folder, runtime=runtime_library(), device=0)


def test_a_fresh_process_runs_its_code_without_compiling(built: Path) -> None:
    command = [sys.executable, "-m", "tests.sm100.support.library_process", str(built)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert float(done.stdout) < 1e-6


def test_it_holds_the_kernels_asked_for(built: Path) -> None:
    assert load(built).names == {key.name for key in KEYS}


@pytest.mark.parametrize(("device", "loaded"), [(None, 3), (0, 0), (1, 1)])
def test_kernels_are_loaded_into_one_device(
    device: int | None, loaded: int, built: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The current one unless another is named: a rank takes no memory of the others' GPUs."""
    calls: list[int] = []

    def call(held: Library, symbol: str, *pointers: Any) -> None:
        if symbol.endswith("_cuda_load_to_device"):
            calls.append(pointers[1].contents.value)

    monkeypatch.setattr(Library, "_call", call)
    monkeypatch.setattr(library, "_current_device", lambda: 3)
    assert Library(built, runtime=runtime_library(), device=device).kernel(KEYS[0]) is not None
    assert calls == [loaded]


def test_a_linker_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(LibraryError, match="no-such-cc: expected a C compiler to link .*; install one"):
        link({}, tmp_path, tmp_path / "out", linker="no-such-cc")


def test_what_it_lacks_is_compiled_only_if_allowed(built: Path) -> None:
    other = KernelKey("sm_100a", KernelShape(16))
    assert load(built).kernel(other) is None
    with pytest.raises(LibraryError, match="token_tile=16.*compiling is switched off; rebuild"):
        KernelCache(load(built), compile_missing=False).get(other)


@pytest.mark.parametrize("changed", ["common/load_warp.py", "common/shape.py", "sm90/gemm.py", "sm100/gemm.py"])
def test_other_sources_make_it_stale(
    changed: str, built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = shutil.copytree(library.SOURCES, tmp_path / "kernels")
    with (sources / changed).open("a") as file:
        file.write("# changed\n")
    monkeypatch.setattr(library, "SOURCES", sources)
    with pytest.raises(LibraryError, match="kernels.json: sources: expected .* built from something else: rebuild"):
        load(built)


def test_a_file_more_makes_it_stale(built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources = shutil.copytree(library.SOURCES, tmp_path / "kernels")
    monkeypatch.setattr(library, "SOURCES", sources)
    load(built)
    (sources / "common" / "more.py").touch()
    with pytest.raises(LibraryError, match="kernels.json: sources: expected"):
        load(built)


def test_another_compiler_makes_it_stale(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "version", lambda name: "4.9.0")
    with pytest.raises(LibraryError, match="nvidia-cutlass-dsl: expected 4.9.0, found 4.8.0"):
        load(built)


@pytest.mark.parametrize("name", ["format", "sources", "interface", "nvidia-cutlass-dsl"])
def test_a_manifest_must_say_all(name: str, built: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(built, tmp_path / "copy")
    manifest = json.loads((folder / MANIFEST).read_text())
    del manifest[name]
    (folder / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(LibraryError, match=f"{name}: expected .*found None"):
        load(folder)


def test_a_foreign_file_is_refused(built: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(built, tmp_path / "copy")
    (folder / LIBRARY).write_bytes((folder / LIBRARY).read_bytes() + b"\0")
    with pytest.raises(LibraryError, match=f"{LIBRARY}: not the file that {MANIFEST} describes"):
        load(folder)


@pytest.mark.parametrize("name", [MANIFEST, LIBRARY])
def test_both_files_must_be_there(name: str, built: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(built, tmp_path / "copy")
    (folder / name).unlink()
    with pytest.raises(LibraryError, match=f"expected {MANIFEST} and {LIBRARY}.*No such file"):
        load(folder)


@pytest.mark.parametrize("text", ["", "[]", "{"])
def test_a_manifest_that_is_none(text: str, built: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(built, tmp_path / "copy")
    (folder / MANIFEST).write_text(text)
    with pytest.raises(LibraryError, match=MANIFEST):
        load(folder)


@pytest.fixture
def linker(tmp_path: Path) -> str:
    """Stands for a linker: takes no objects."""
    script = tmp_path / "linker"
    script.write_text('#!/bin/sh\necho code > "$3"\n')
    script.chmod(0o755)
    return str(script)


def test_a_library_appears_complete_with_its_manifest_last(
    built: Path, linker: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a build that is cut off leaves is no library, and a process that has loaded the old one keeps its file."""
    folder, moved = shutil.copytree(built, tmp_path / "copy"), list[str]()
    held = (folder / LIBRARY).open("rb")
    old = (folder / LIBRARY).read_bytes()
    rename = Path.rename

    def note(source: Path, target: Path) -> Path:
        assert not (folder / MANIFEST).exists()
        moved.append(target.name)
        return rename(source, target)

    monkeypatch.setattr(Path, "rename", note)
    link({}, tmp_path, folder, linker)
    assert moved == [LIBRARY, MANIFEST]
    assert {file.name for file in folder.iterdir()} == {LIBRARY, MANIFEST}
    with held:
        assert held.read() == old
    assert library.names_in(folder) == set()


def test_a_build_that_cannot_write_leaves_no_library(
    built: Path, linker: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = shutil.copytree(built, tmp_path / "copy")

    def full(file: Path, content: bytes) -> int:
        file.touch()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(LibraryError, match=f"{folder}: expected a folder to write {LIBRARY} to, .*No space left"):
        link({}, tmp_path, folder, linker)
    assert {file.name for file in folder.iterdir()} == {LIBRARY}


def test_code_of_another_machine_is_refused(built: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(built, tmp_path / "copy")
    code = b"no code"
    (folder / LIBRARY).write_bytes(code)
    manifest = json.loads((folder / MANIFEST).read_text())
    (folder / MANIFEST).write_text(json.dumps(manifest | {"sha256": hashlib.sha256(code).hexdigest()}))
    with pytest.raises(LibraryError, match=f"{LIBRARY}: expected a library for this machine: .*rebuild it here"):
        load(folder)


@pytest.mark.parametrize("kernels", [None, []])
def test_a_manifest_names_its_kernels(kernels: Any, built: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(built, tmp_path / "copy")
    manifest = json.loads((folder / MANIFEST).read_text())
    (folder / MANIFEST).write_text(json.dumps(manifest | {"kernels": kernels}))
    with pytest.raises(LibraryError, match="kernels: expected an object, found .*; rebuild the library"):
        load(folder)
