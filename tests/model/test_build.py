"""``nvfp4-sgl build``: kernels compiled on one machine and found by servers on another."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import triton

from nvfp4_sgl import build, cli
from nvfp4_sgl.build import Serving
from nvfp4_sgl.checkpoint.verified import Verified, verify
from nvfp4_sgl.cutedsl_kernels.compiled import KernelKey
from nvfp4_sgl.cutedsl_kernels.library import LIBRARY, MANIFEST, Library
from nvfp4_sgl.cutedsl_kernels.sm90.shape import KernelShape
from nvfp4_sgl.ops.modes import ActivationMode
from nvfp4_sgl.synthetic.tiny import write_tiny
from nvfp4_sgl.targets.fused import compile_ahead
from nvfp4_sgl.targets.target import descriptor
from nvfp4_sgl.triton_kernels import ahead
from nvfp4_sgl.triton_kernels.ahead import Variant
from tests.sm100.emulator.host import runtime_library
from tests.support.compiled_kernels import SMALLEST_KERNEL, hits, normalise, noted, run_here


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny") / "nvfp4-full"
    write_tiny(path, "nvfp4-full", seed=11)
    return path


@pytest.fixture(scope="module")
def verified(tiny: Path) -> Verified:
    return verify(tiny)


def test_built_on_one_machine_found_on_another(
    tiny: Path, caches: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One Triton variant a kernel and one GEMM, of all that the command would compile."""
    everything = build.needed

    def few(*arguments: Any) -> tuple[Sequence[KernelKey], Sequence[Variant]]:
        gemms, variants = everything(*arguments)
        return list(gemms)[:1], list({variant.name: variant for variant in variants}.values())

    monkeypatch.setattr(build, "needed", few)
    out = tmp_path / "out"
    options = ["--target", "sm_90a", "--output", str(out), "--context-length", "512"]
    assert cli.main(["build", str(tiny), *options, "--max-running-requests", "1", "--chunked-prefill-size", "16"]) == 0
    variants = few(verify(tiny), "sm_90a", Serving(1, 512, 1, 16), descriptor("sm_90a").gpu())[1]
    assert f"1 GEMMs and {len(variants)} Triton kernels for sm_90a are in {out}" in capsys.readouterr().out
    moved = shutil.move(out, tmp_path / "carried")
    assert not any(variant.is_compiled for variant in variants) and not caches.exists()
    ahead.adopt(Path(moved) / compile_ahead.TRITON_FOLDER)
    assert all(variant.is_compiled for variant in variants)
    compiled: list[bool] = []
    with (
        mock.patch.object(
            triton.knobs.compilation, "listener", lambda *args, cache_hit, **more: compiled.append(cache_hit)
        ),
        ahead.targeting(90, 132),
    ):
        for variant in variants:
            variant.compile()
    assert compiled == [True] * len(variants)


def test_a_server_compiles_nothing_that_was_built_ahead(
    verified: Verified, caches: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What its process compiles beside the loading, with empty caches; all of the GEMMs if one is lacking."""
    variants, keys = noted(normalise), [KernelKey("sm_90a", KernelShape(8))]
    monkeypatch.setattr(build, "needed", lambda *given: (keys, variants))
    out, setting = tmp_path / "out", Serving(1, 512)
    build.build(verified, "sm_90a", [setting], out)
    jobs: list[compile_ahead.Job] = []
    monkeypatch.setattr(compile_ahead, "_run", lambda job, processes: jobs.append(job))
    compile_ahead.adopt_given(out)
    build.build(verified, "sm_90a", [setting], given=out)
    assert not jobs
    keys.append(KernelKey("sm_90a", KernelShape(16)))
    with pytest.raises(FileNotFoundError):  # what was not compiled is not there to be linked
        build.build(verified, "sm_90a", [setting], given=out)
    assert [set(job.tasks) for job in jobs] == [set(keys)]


@pytest.fixture
def cached(
    here: None, verified: Verified, caches: Path, library: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[KernelKey], list[Variant], Callable[[Path], set[KernelKey | Variant]]]:
    """What a server needs, all of it in this user's caches; and ``build(out)``, which tells what it has compiled."""
    variants, keys = [*noted(normalise), *noted(lambda: normalise(width=512))], [SMALLEST_KERNEL]
    monkeypatch.setattr(build, "needed", lambda *given: (keys, variants))
    shutil.copytree(library, compile_ahead.library_folder(keys))
    build.build(verified, "sm_90a", [Serving(1, 512)])

    def compiled(out: Path) -> set[KernelKey | Variant]:
        tasks: set[KernelKey | Variant] = set()

        def run(job: compile_ahead.Job, processes: int) -> None:
            tasks.update(job.tasks)
            run_here(job, processes)

        monkeypatch.setattr(compile_ahead, "_run", run)
        build.build(verified, "sm_90a", [Serving(1, 512)], out)
        return tasks

    return keys, variants, compiled


def test_a_build_copies_what_this_user_s_caches_hold(
    cached: Any, caches: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What lies there is complete: launches find it when the caches are gone."""
    keys, _, compiled = cached
    with caplog.at_level("INFO", compile_ahead.logger.name):
        assert not compiled(tmp_path / "out")
        assert not compiled(tmp_path / "out")
    assert [record.getMessage() for record in caplog.records] == [
        "copied 1 GEMMs and 2 Triton kernels from this user's caches"
    ]
    shutil.rmtree(caches)
    shutil.rmtree(tmp_path / "user")
    assert Library(tmp_path / "out", runtime=runtime_library(), device=0).names == {key.name for key in keys}
    with ahead.cached_in(tmp_path / "out" / compile_ahead.TRITON_FOLDER):
        assert hits(normalise) == hits(lambda: normalise(width=512)) == [True]


def test_a_build_compiles_what_this_user_s_caches_lack(cached: Any, caches: Path, tmp_path: Path) -> None:
    """A kernel without one of its files; GEMMs that are more than those of a library."""
    keys, variants, compiled = cached
    lacking = variants[0]
    (code,) = (file for file in lacking.files() if file.suffix == ".cubin")
    code.unlink()
    assert compiled(tmp_path / "out") == {lacking}
    keys.append(KernelKey("sm_90a", KernelShape(16)))
    assert compiled(tmp_path / "second") == {lacking, *keys}
    with ahead.cached_in(tmp_path / "second" / compile_ahead.TRITON_FOLDER):
        assert all(variant.is_compiled for variant in variants)
    assert not lacking.is_compiled


@pytest.mark.parametrize("name", [MANIFEST, LIBRARY])
def test_a_build_copies_no_damaged_library(
    name: str, cached: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keys, _, compiled = cached
    file = compile_ahead.library_folder(keys) / name
    file.write_bytes(file.read_bytes()[:40])
    assert compiled(tmp_path / "out") == {*keys} and not caplog.text


def test_a_build_compiles_what_cannot_be_copied(
    cached: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, variants, compiled = cached
    monkeypatch.setattr(ahead, "adopt", mock.Mock(side_effect=PermissionError("held back")))
    assert compiled(tmp_path / "out") == {*keys, *variants}
    assert "kernels of this user's caches cannot be copied: held back" in caplog.text


def test_what_is_built_for_this_machine_is_where_its_servers_look(
    verified: Verified, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang moves Triton's cache when it is imported; a build does not import it."""
    looked: list[str] = []
    monkeypatch.setattr(build, "needed", lambda *given: ([], []))
    monkeypatch.setattr(compile_ahead, "compile_missing", lambda *given: looked.append(triton.knobs.cache.dir))
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    monkeypatch.setenv("SGLANG_CACHE_DIR", str(tmp_path))
    build.build(verified, "sm_90a", [Serving(1, 512)], tmp_path / "out")
    assert "TRITON_CACHE_DIR" not in os.environ
    build.build(verified, "sm_90a", [Serving(1, 512)])
    assert looked == [str(tmp_path / "out" / compile_ahead.TRITON_FOLDER), str(tmp_path / "triton")]


def test_build_asks_for_a_target_where_no_gpu_is(
    tiny: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cli.main(["build", str(tiny)]) == 2
    assert "--target: expected one, since this machine has no GPU: sm_90a (Hopper)" in capsys.readouterr().err


def test_the_mode_that_is_built_for(
    tiny: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Serving] = []

    def note(verified: Verified, target: str, settings: Sequence[Serving], output: Path | None) -> tuple[int, int]:
        asked.extend(settings)
        return 0, 0

    monkeypatch.setattr(build, "build", note)
    for words in ([], ["--mode", "w4a4"]):
        assert cli.main(["build", str(tiny), "--target", "sm_90a", *words]) == 0
    assert [setting.mode for setting in asked] == [ActivationMode.W4A16, ActivationMode.W4A4]
    assert cli.main(["build", str(tiny), "--target", "sm_100a", "--mode", "w4a16"]) == 2
    assert "activation_mode 'w4a16': on sm_100a expected one of w4a4" in capsys.readouterr().err
