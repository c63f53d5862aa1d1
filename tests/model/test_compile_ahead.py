"""Kernels compiled ahead: noted without a launch, compiled in other processes, found by the launch."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from triton.compiler import CompiledKernel
from triton.runtime import jit

from nvfp4_sgl import pushed_sums
from nvfp4_sgl.build import Serving, needed, with_distinct_layers
from nvfp4_sgl.checkpoint.reader import CheckpointReader
from nvfp4_sgl.checkpoint.verified import Verified, verify
from nvfp4_sgl.cutedsl_kernels import launcher
from nvfp4_sgl.cutedsl_kernels.compiled import KernelKey
from nvfp4_sgl.cutedsl_kernels.errors import LibraryError
from nvfp4_sgl.cutedsl_kernels.library import LIBRARY, MANIFEST, Library
from nvfp4_sgl.cutedsl_kernels.sm90.shape import KernelShape
from nvfp4_sgl.memory.pools import table_margin
from nvfp4_sgl.model.contract import Slots
from nvfp4_sgl.ops.modes import ActivationMode
from nvfp4_sgl.standalone import Standalone
from nvfp4_sgl.synthetic.tiny import write_tiny
from nvfp4_sgl.targets.fused import compile_ahead, gemm_bf16, gemm_planner
from nvfp4_sgl.targets.fused.exchange import lone_exchange
from nvfp4_sgl.targets.fused.gemm_planner import DryLauncher, GemmPlanner
from nvfp4_sgl.targets.fused.planner import FusedPlanner
from nvfp4_sgl.targets.target import descriptor
from nvfp4_sgl.triton_kernels import ahead
from nvfp4_sgl.triton_kernels.ahead import Variant
from nvfp4_sgl.triton_kernels.attention import tiling
from nvfp4_sgl.triton_kernels.common import chip
from nvfp4_sgl.triton_kernels.entries.pool import last_row, last_slot
from nvfp4_sgl.triton_kernels.experts.permutation import Routes
from nvfp4_sgl.triton_kernels.indexer import scores
from nvfp4_sgl.weights.parallel import TensorParallel, lone_rank
from tests.sm100.emulator.host import runtime_library
from tests.support import native, on_import
from tests.support.compiled_kernels import SMALLEST_KERNEL, hits, loading, normalise, noted
from tests.support.full import but_for
from tests.support.noting_launcher import NotingLauncher

W4A16, W4A4 = ActivationMode.W4A16, ActivationMode.W4A4
CASES = [
    ("sm_90a", W4A16, "nvfp4-full"),
    ("sm_90a", W4A16, "nvfp4-experts"),
    ("sm_90a", W4A16, "deepseek"),
    ("sm_90a", W4A4, "nvfp4-full"),
    ("sm_90a", W4A4, "nvfp4-experts"),
    ("sm_100a", W4A4, "nvfp4-full"),
    ("sm_100a", W4A4, "nvfp4-experts"),
]
"""Each target and mode runs in each of two tests, with one format in one and another in the other but with --full."""
LAUNCHED, UNSTORED = CASES[::2], CASES[1::2]
CAPACITY, REQUESTS = 1024, 6
PUSHED = 64
"""Tokens of the largest pass whose sums are pushed."""


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """By format."""
    paths = {name: tmp_path_factory.mktemp("tiny") / name for *_, name in CASES}
    for name, path in paths.items():
        write_tiny(path, name, seed=11)
    return paths


@pytest.fixture(scope="module")
def tiny(checkpoints: dict[str, Path]) -> Path:
    return checkpoints["nvfp4-full"]


@pytest.fixture(scope="module")
def verified(tiny: Path) -> Verified:
    return verify(tiny)


def test_launches_are_noted_and_not_made() -> None:
    def launches() -> None:
        normalise()
        normalise(5)
        normalise(width=512)

    names = [variant.name for variant in noted(launches)]
    assert len(names) == 2 and len(set(names)) == 1


def test_triton_describes_a_variant_once() -> None:
    """A warm-up launches it some sixty times, and a description takes most of a launch's time."""

    def launches() -> None:
        for _ in range(3):
            normalise()

    describe = jit.serialize_specialization_data
    with mock.patch.object(jit, "serialize_specialization_data", mock.Mock(side_effect=describe)) as described:
        assert len(noted(launches)) == 1
    assert described.call_count == 1


def test_what_is_loaded_is_noted_and_not_made_either(caches: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would run on what no kernel before it has computed."""
    runs: list[CompiledKernel] = []
    monkeypatch.setattr(CompiledKernel, "run", property(lambda self: lambda *arguments: runs.append(self)))
    monkeypatch.setattr(CompiledKernel, "launch_metadata", lambda *arguments: None)
    with ahead.targeting(90, 132):
        normalise()
        with ahead.recording() as variants:
            normalise()
        assert len(variants) == len(runs) == 1
        normalise()
    assert len(runs) == 2 and runs[0] is runs[1]


def test_what_was_compiled_elsewhere_is_found_by_the_launch(caches: Path) -> None:
    variants = noted(normalise)
    assert not variants[0].is_compiled
    compile_ahead.compile_missing([], variants, caches, 90)
    assert variants[0].is_compiled
    assert hits(normalise) == [True]
    assert hits(lambda: normalise(width=512)) == [False]


def test_what_lacks_a_file_is_compiled_again(here: None, caches: Path) -> None:
    """Triton reads none of a kernel's files if one is missing, and would compile it at its launch."""
    (variant,) = noted(normalise)
    compile_ahead.compile_missing([], [variant], caches, 90)
    (code,) = caches.glob("*/*.llir")
    code.unlink()
    assert not variant.is_compiled
    with loading(), ahead.compiled_here() as names:
        normalise(width=512)
    assert names == [variant.name]
    compile_ahead.compile_missing([], [variant], caches, 90)
    assert code.exists() and variant.is_compiled and hits(normalise) == [True]


def test_what_is_there_is_not_compiled_again(here: None, caches: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    variants, key = noted(normalise), SMALLEST_KERNEL
    folder = compile_ahead.library_folder([key])
    compile_ahead.compile_missing([key], variants, folder, 90)
    assert Library(folder, runtime=runtime_library(), device=0).names == {key.name}
    monkeypatch.setattr(compile_ahead, "_run", mock.Mock(side_effect=AssertionError("compiled")))
    compile_ahead.compile_missing([key], variants, folder, 90)
    with pytest.raises(AssertionError, match="compiled"):
        compile_ahead.compile_missing([key], noted(lambda: normalise(width=512)), folder, 90)


@pytest.mark.parametrize("name", [MANIFEST, LIBRARY])
def test_a_damaged_library_is_compiled_again(
    name: str, here: None, caches: Path, library: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Else no server of this user could start any more."""
    key, folder = SMALLEST_KERNEL, compile_ahead.library_folder([SMALLEST_KERNEL])
    shutil.copytree(library, folder)
    (folder / name).write_bytes((folder / name).read_bytes()[:40])
    compile_ahead.compile_missing([key], [], folder, 90)
    assert Library(folder, runtime=runtime_library(), device=0).names == {key.name}
    (said,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert said.startswith(f"compiling a library again that cannot be used: {folder}")


def test_a_library_that_lacks_a_kernel_is_compiled_again(
    here: None, caches: Path, library: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As by a second ``nvfp4-sgl build`` into a folder, for other sizes."""
    second = KernelKey("sm_90a", KernelShape(16))
    shutil.copytree(library, caches / "out")
    compile_ahead.compile_missing([second], [], caches / "out", 90)
    assert Library(caches / "out", runtime=runtime_library(), device=0).names == {second.name}
    assert "1 of 1 GEMMs are not there: compiling all again" in caplog.text


def test_what_is_there_needs_no_cache_folder(here: None, caches: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor the lock of one: a process that compiles other kernels is not waited for."""
    variants, key = noted(normalise), KernelKey("sm_90a", KernelShape(8))
    compile_ahead.compile_missing([key], variants, caches / "out", 90)
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nope")
    compile_ahead.compile_missing([key], variants, caches / "out", 90)
    compile_ahead.compile_missing([], [], caches / "nothing", 90)
    with pytest.raises(LibraryError, match="/proc/nope/nvfp4-sgl: expected a folder to keep .* let XDG_CACHE_HOME"):
        compile_ahead.compile_missing([key], variants, caches / "nothing", 90)


def test_what_another_compiled_meanwhile_is_not_compiled_again(caches: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (variant,) = noted(normalise)
    found = iter([False, True])
    monkeypatch.setattr(Variant, "is_compiled", property(lambda self: next(found)))
    monkeypatch.setattr(compile_ahead, "_run", mock.Mock(side_effect=AssertionError("compiled")))
    compile_ahead.compile_missing([], [variant], caches, 90)
    assert not list(found)


def test_the_log_names_what_is_compiled(here: None, caches: Path, caplog: pytest.LogCaptureFixture) -> None:
    """So that kernels which an earlier compilation had not foreseen are seen by name."""
    variants = noted(normalise)
    with caplog.at_level("INFO", compile_ahead.logger.name):
        compile_ahead.compile_missing([], variants, caches, 90)
        compile_ahead.compile_missing([], variants, caches, 90)
    named = [record.getMessage() for record in caplog.records if "compiling" in record.getMessage()]
    assert len(named) == 1 and named[0].endswith(f"; {variants[0].name} {len(variants)}")


def test_what_another_build_of_triton_compiled_is_not_there(
    here: None, caches: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One for another Python has the same version, and its own keys."""
    variants = noted(normalise)
    compile_ahead.compile_missing([], variants, caches, 90)
    monkeypatch.setattr(ahead, "triton_key", lambda: "another build")
    assert not variants[0].is_compiled


def test_each_kernel_is_compiled_by_one_process(tmp_path: Path) -> None:
    job = compile_ahead.Job([KernelKey("sm_90a", KernelShape(tile)) for tile in (8, 16, 32)], 90, tmp_path)
    first, second = job.claim(), job.claim()
    taken = [next(first)[0], next(second)[0], next(first)[0]]
    assert taken == [0, 1, 2] and not list(first) and not list(second)


def test_no_process_asks_the_driver(caches: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a host with GPUs each would initialise it, seconds in which it serves one process at a time."""
    (tmp_path / "sitecustomize.py").write_text(
        f"""
import os, sys
sys.path.append({str(Path(on_import.__file__).parent)!r})
import on_import
end = lambda module: setattr(module, "detect_gpu_arch", lambda prefix: os._exit(3))
on_import.patch_on_import({{"cutlass.base_dsl.env_manager": end}})
"""
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    key = KernelKey("sm_90a", KernelShape(8))
    compile_ahead.compile_missing([key], [], caches / "library", 90)
    assert (caches / "library" / MANIFEST).exists()


def test_a_kernel_that_does_not_compile_is_named(caches: Path) -> None:
    variant = Variant("nvfp4_sgl.triton_kernels.hyper_connection.streams", "no_such_kernel", "{}", b"")
    job = compile_ahead.Job([variant], 90, caches)
    caches.mkdir()
    with pytest.raises(LibraryError, match="compiling kernels failed(.|\n)*no_such_kernel"):
        compile_ahead._run(job, 1)


def test_the_interpreter_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "INTERPRETED", True)
    with pytest.raises(RuntimeError, match="TRITON_INTERPRET=1: .* unset it"), ahead.recording():
        pass


def test_tilings_are_those_of_the_gpu_assumed() -> None:
    prefill = mock.Mock(is_decode=False)
    with ahead.targeting(100, 148):
        assert chip.processors(torch.device("cpu")) == 148
        assert not chip.is_before_blackwell()
        assert scores.default_tiling(prefill) == scores.PREFILL
        assert tiling.default_tiling(64, packed=True) == tiling.BLACKWELL
    with ahead.targeting(90, 132):
        assert chip.is_before_blackwell()
        assert scores.default_tiling(prefill) == scores.HOPPER_PREFILL
        assert tiling.default_tiling(64, packed=True) == tiling.HOPPER
    assert chip.processors(torch.device("cpu")) == 1


# --- models -----------------------------------------------------------------------------------------------------


class OnTheCpu:
    """A model on a GPU target whose launches are noted, on real tensors."""

    def __init__(
        self,
        path: Path,
        target: str,
        uniform_experts: bool = False,
        mode: ActivationMode | None = None,
        parallel: TensorParallel | None = None,
    ) -> None:
        gpu = descriptor(target).gpu()
        self._gpu, self.launcher = gpu, NotingLauncher(target, gpu.clusters)
        read = CheckpointReader.read
        # Aligned, as on a GPU: what is read lies in the file as it comes.
        with mock.patch.object(CheckpointReader, "read", lambda *given, **more: read(*given, **more).clone()):
            self.model = Standalone(
                path, target=target, mode=mode, requests=REQUESTS, capacity=CAPACITY, parallel=parallel,
                uniform_experts=uniform_experts,
            )  # fmt: skip
        table = torch.zeros(REQUESTS + 1, CAPACITY + table_margin(0), dtype=torch.int32)
        slots = Slots(table, self.model.caches.full_to_swa, REQUESTS, CAPACITY)
        context = self.model.decoder.context
        planner = context.boundaries.plan(context, slots, self.model.caches.layers)
        assert isinstance(planner, GemmPlanner)
        self.planner = planner

    def variants(self, work: Callable[[], object]) -> set[Variant]:
        """What ``work`` launches."""
        with (
            ahead.targeting(self._gpu.capability, self._gpu.processors),
            launcher.use(self.launcher),
            ahead.recording() as found,
        ):
            work()
        return set(found)

    def warm_up(self, planner: Any = None) -> set[Variant]:
        planner = planner or self.planner
        return self.variants(lambda: planner.warm_up(self.model.decoder, self.model.table, CAPACITY))


@pytest.mark.parametrize(("target", "mode", "name"), but_for(CASES, *UNSTORED))
def test_no_pass_launches_what_the_warm_up_does_not(
    target: str, mode: ActivationMode, name: str, checkpoints: dict[str, Path]
) -> None:
    cpu = OnTheCpu(checkpoints[name], target, mode=mode)
    warm, model = cpu.warm_up(cpu.model.planner), cpu.model
    generator = torch.Generator().manual_seed(0)

    def tokens(count: int) -> list[int]:
        return torch.randint(2, 500, (count,), generator=generator).tolist()

    def serve() -> None:
        for count in torch.randint(1, 800, (8,), generator=generator).tolist():
            model.reset()
            model.extend({0: tokens(count)})
            model.extend({0: tokens(3), 1: tokens(129), 2: tokens(1)})
            for requests in (1, 3, REQUESTS):
                model.extend({request: tokens(1) for request in range(requests)})

    cpu.launcher.gemms.clear()
    missed = cpu.variants(serve) - warm
    with launcher.use(cpu.launcher):
        assert cpu.launcher.gemms and cpu.launcher.gemms <= set(model.planner.gemms(CAPACITY))
    assert not missed, [f"{variant.name}: {variant.specialization}" for variant in missed][:3]


def test_no_pass_of_a_rank_that_pushes_launches_what_the_warm_up_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GEMMs of passes up to the inboxes' capacity store copies, those of longer passes do not."""
    path = native.write_checkpoint("sm_90a", tmp_path, seed=11, num_attention_heads=4, moe_intermediate_size=128)
    width = verify(path).config.hidden_size
    monkeypatch.setattr(pushed_sums, "MAX_PUSHED_TOKENS", PUSHED)
    share = replace(lone_rank(2), exchange=lone_exchange(2, width, torch.device("cpu")))
    cpu = OnTheCpu(path, "sm_90a", parallel=share)
    for count in (1, PUSHED, PUSHED + 1, CAPACITY):
        cpu.launcher.gemms.clear()
        cpu.model.reset()
        cpu.variants(partial(cpu.model.extend, {0: [*range(2, 2 + count)]}))
        copies = {key.shape.copies for key in cpu.launcher.gemms if isinstance(key.shape, KernelShape)}
        assert copies == ({0, 1} if count <= PUSHED else {0}), count
        with launcher.use(cpu.launcher):
            assert cpu.launcher.gemms <= set(cpu.planner.gemms(CAPACITY))
    built, _ = needed(verify(path), "sm_90a", Serving(2, CAPACITY, REQUESTS, CAPACITY), descriptor("sm_90a").gpu())
    with launcher.use(DryLauncher("sm_90a", descriptor("sm_90a").gpu().clusters)):
        assert list(built) == list(cpu.planner.gemms(CAPACITY))


@pytest.mark.parametrize(
    ("target", "mode", "name", "uniform"),
    but_for([*((*case, False) for case in CASES), (*CASES[0], True)], *((*case, False) for case in LAUNCHED)),
)
def test_a_model_without_storage_needs_the_same_kernels(
    target: str, mode: ActivationMode, name: str, uniform: bool, checkpoints: dict[str, Path]
) -> None:
    setting = Serving(1, CAPACITY, REQUESTS, CAPACITY, uniform, mode)
    gemms, variants = needed(verify(checkpoints[name]), target, setting, descriptor(target).gpu())
    cpu = OnTheCpu(checkpoints[name], target, uniform, mode)
    assert set(variants) == cpu.warm_up()
    with launcher.use(DryLauncher(target, descriptor(target).gpu().clusters)):
        assert list(gemms) == list(cpu.planner.gemms(CAPACITY))


def test_experts_by_torch_get_offsets_while_launches_are_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is routed then, but torch's GEMM runs, and on a GPU it asserts that its offsets lie within the rows."""
    write_tiny(tmp_path, "bf16", seed=11)
    cpu, calls = OnTheCpu(tmp_path, "sm_90a"), list[Tensor]()
    allocate = Routes.allocate

    def poisoned(*given: Any) -> Routes:
        routes = allocate(*given)
        routes.offsets.fill_(1 << 30)
        return routes

    def grouped_mm(rows: Tensor, weight: Tensor, *, offs: Tensor) -> Tensor:
        assert bool((offs.diff() >= 0).all()) and int(offs[0]) >= 0 and int(offs[-1]) <= len(rows)
        calls.append(offs)
        return rows.new_empty(len(rows), weight.shape[2])

    monkeypatch.setattr(Routes, "allocate", poisoned)
    monkeypatch.setattr(gemm_bf16.functional, "grouped_mm", grouped_mm)
    assert cpu.warm_up() and calls


def test_a_model_of_a_librarys_gemms_needs_no_library_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does the folder that was built for it hold one."""
    write_tiny(tmp_path, "bf16", seed=11, num_hidden_layers=1)
    cpu, built = OnTheCpu(tmp_path, "sm_90a"), tmp_path / "built"
    (built / compile_ahead.TRITON_FOLDER).mkdir(parents=True)
    monkeypatch.setenv(compile_ahead.LIBRARY_VARIABLE, str(built))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    runner = launcher.CudaLauncher()
    monkeypatch.setattr(runner, "architecture", lambda device: "sm_90a")
    monkeypatch.setattr(runner, "clusters", lambda device: descriptor("sm_90a").gpu().clusters)
    compiled: list[Any] = []
    monkeypatch.setattr(gemm_planner, "compile_missing", lambda keys, *more: compiled.append(list(keys)))
    monkeypatch.setattr(GemmPlanner, "triton_variants", lambda *given: [])
    monkeypatch.setattr(FusedPlanner, "warm_up", lambda *given: None)
    with launcher.use(runner):
        cpu.planner.warm_up(cpu.model.decoder, cpu.model.table, CAPACITY)
    assert compiled == [[]]
    with pytest.raises(LibraryError, match="compiling is switched off"):
        runner.kernels.get(KernelKey("sm_90a", KernelShape(8)))


def test_kernels_that_were_built_or_compiled_are_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a folder that the environment names are copied first; then the library holds every GEMM."""
    done: list[tuple[str, Path]] = []
    monkeypatch.setenv(compile_ahead.LIBRARY_VARIABLE, str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(gemm_planner, "adopt_given", lambda given: done.append(("adopt", given)))
    monkeypatch.setattr(gemm_planner, "folder_of", lambda keys, given: tmp_path / "library")
    monkeypatch.setattr(gemm_planner, "compile_missing", lambda *given: done.append(("compile", given[2])))
    monkeypatch.setattr(gemm_planner, "Library", lambda folder: ("load", folder))
    monkeypatch.setattr(GemmPlanner, "gemms", lambda planner, tokens: [KernelKey("sm_90a", KernelShape(8))])
    monkeypatch.setattr(GemmPlanner, "triton_variants", lambda *given: [])
    runner = launcher.CudaLauncher()
    monkeypatch.setattr(runner.kernels, "add", done.append)
    with launcher.use(runner):
        planner: Any = object.__new__(GemmPlanner)
        planner.context = mock.Mock()
        planner.compile_missing(mock.sentinel.decoder, mock.sentinel.table, CAPACITY)
    library = tmp_path / "library"
    assert done == [("adopt", tmp_path), ("compile", library), ("load", library)]


def test_a_layer_of_each_kind_launches_what_all_do(tiny: Path) -> None:
    cpu = OnTheCpu(tiny, "sm_90a")
    decoder, layers = cpu.model.decoder, cpu.model.config.num_hidden_layers
    assert len(decoder.distinct_layers()) < layers
    some = cpu.warm_up()
    with mock.patch.object(type(decoder), "distinct_layers", lambda self: list(range(layers))):
        assert cpu.warm_up() == some


def test_layers_to_build_hold_every_kind(verified: Verified) -> None:
    config, short = verified.config, with_distinct_layers(verified)

    def kinds(of: Any) -> set[Any]:
        return {(of.kind(layer), of.is_hash_routed(layer)) for layer in range(of.num_hidden_layers)}

    assert short.num_hidden_layers < config.num_hidden_layers and kinds(short) == kinds(config)


@pytest.mark.parametrize("target", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize(("name", "shared"), [("nvfp4-full", 1), ("nvfp4-experts", 0), ("deepseek", 0)])
def test_a_shared_expert_that_runs_apart_is_none_of_the_planned_groups(
    name: str, shared: int, target: str, checkpoints: dict[str, Path]
) -> None:
    cpu = OnTheCpu(checkpoints[name], target)
    config, block = cpu.model.config, cpu.model.decoder.layers[0]
    planned = {(p.groups, p.experts_per_token) for p in cpu.planner.gemm_specs() if p.experts_per_token}
    assert planned == {(config.n_routed_experts + shared, config.num_experts_per_tok + shared)}
    routes = block.ffn.experts.new_routes(3)
    assert {(routes.groups, routes.topk)} == planned


def test_the_number_of_free_pages_compiles_nothing_else():
    """Bounds of pools are odd: never multiples of 16, on which Triton would specialise."""
    for pages in range(2, 40):
        assert all(last_slot(torch.empty(pages, 0), size) % 2 for size in (2, 64, 256))
        assert last_row(torch.empty(4 * pages, 0)) % 2
