"""How launches come to the emulator: specialised as for a GPU, confined to their tensors, ordered, and judged."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.compiler import CompiledKernel
from triton.runtime.driver import driver
from triton.runtime.errors import OutOfResources

from nvfp4_sgl.formats.rows import Rows
from nvfp4_sgl.triton_kernels.common import chip
from nvfp4_sgl.triton_kernels.common.overlap import OVERLAPPED, after_previous
from nvfp4_sgl.triton_kernels.hyper_connection.streams import rms_norm
from nvfp4_sgl.triton_kernels.quantize.quantize import quantize
from tests.sm100.emulator import DeadlockError, HazardError, MemoryFaultError, Options, UnsupportedError
from tests.sm100.support import triton_launch
from tests.sm100.support.triton_launch import current_emulator, emulated_triton
from tests.sm100.triton.damage import damage


class _Pair(NamedTuple):
    source: Tensor
    size: int
    unused: None
    factor: float
    SHIFT: tl.constexpr


@triton.jit
def _copy(pair, out, narrow, one, EXTRA: tl.constexpr):
    after_previous()
    index = tl.program_id(1) * 4 + tl.arange(0, 4)
    known = index < pair.size
    values = tl.load(pair.source + index, mask=known, other=0.0)
    tl.store(out + index, values * pair.factor + (narrow << pair.SHIFT) + one + EXTRA + tl.num_programs(2), mask=known)


@triton.jit
def _beyond(out, index):
    tl.store(out + index, 1.0)


@triton.jit
def _wait(flag):
    while tl.atomic_add(flag, 0, sem="acquire") == 0:
        pass


def test_parameters_and_grid() -> None:
    """A tuple with a constant and nothing in it, scalars of several widths, one that is compiled in."""
    source, out = torch.randn(6), torch.full((6,), torch.nan)
    pair = _Pair(source, 6, None, 0.5, tl.constexpr(3))
    with emulated_triton() as emulator:
        _copy[(1, 2, 5)](pair, out, 2**33, 1, EXTRA=7, **OVERLAPPED)
    assert torch.equal(out, (source.double() * 0.5 + 2.0**36 + 1 + 7 + 5).float())
    (launch,) = emulator.launches
    assert (launch.name, launch.grid, launch.warps) == ("_copy", (1, 2, 5), 4)
    assert launch.statistics.by_opcode()["griddepcontrol.wait"] == 10 * 4


def test_specialised_on_alignment_as_for_a_gpu() -> None:
    """Nothing is loaded in wide words from a source that begins between multiples of 16 bytes."""
    base = torch.randn(516)
    loads = {}
    for start in (0, 1):
        with emulated_triton() as emulator:
            rms_norm(base[start : start + 512][None], None, 1e-6)
        counts = emulator.launches[0].statistics.by_opcode()
        loads[start] = {name for name in counts if name.startswith("ld.global")}
    assert "ld.global.v4.b32" in loads[0] and "ld.global.v4.b32" not in loads[1]


def test_memory_of_other_tensors_is_out_of_reach() -> None:
    base = torch.zeros(8)
    with emulated_triton(), pytest.raises(MemoryFaultError, match=r"outside argument 0, torch.float32 \[4\]"):
        _beyond[(1,)](base[:4], 4)
    with emulated_triton():
        _beyond[(1,)](base[:4], 3)
    assert base.tolist() == [0, 0, 0, 1, 0, 0, 0, 0]


def test_nothing_is_left_of_it() -> None:
    before, device = driver._active, torch.device("cpu")
    with emulated_triton(multiprocessors=77) as emulator:
        assert current_emulator() is emulator
        assert chip.processors(device) == 77
        with emulated_triton() as inner:
            assert current_emulator() is inner
        assert current_emulator() is emulator
    assert current_emulator() is None and driver._active is before and chip.processors(device) == 1


def test_a_program_that_waits_for_ever_is_reported() -> None:
    with emulated_triton(Options(max_instructions=20_000)), pytest.raises(DeadlockError):
        _wait[(3,)](torch.zeros(1, dtype=torch.int32))


def test_what_no_sm100_can_load_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    run = triton_launch.EmulatedTriton.run

    def greedy(self: triton_launch.EmulatedTriton, compiled: CompiledKernel, *rest: object) -> None:
        compiled.metadata = compiled.metadata._replace(tmem_size=513)
        run(self, compiled, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(triton_launch.EmulatedTriton, "run", greedy)
    with emulated_triton(), pytest.raises(OutOfResources, match="tensor memory"):
        _beyond[(1,)](torch.zeros(5), 2)


def normed_and_quantised(options: Options) -> Rows:
    """Two launches, of which the second reads what the first writes; both allow the next one to begin at once."""
    x = torch.randn(3, 512, generator=torch.Generator().manual_seed(1))
    out = Rows.allocate(3, 512, 8, "cpu")
    normed = torch.full_like(x, torch.nan)
    with emulated_triton(options):
        quantize(rms_norm(x, None, 1e-6, out=normed), out)
    return out


def test_dependent_launches_wait_for_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    overlapping = Options(overlap=True)
    expected = normed_and_quantised(Options())
    assert torch.equal(normed_and_quantised(overlapping).codes, expected.codes)
    damage(monkeypatch, "_quantize_kernel", "griddepcontrol.wait;", "")
    with pytest.raises(HazardError, match="without griddepcontrol.wait between them"):
        normed_and_quantised(overlapping)


def test_a_missing_wait_is_found_in_part_of_a_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    """The launches are given tensors that begin and end elsewhere in the same memory."""
    wide = torch.zeros(3, 512)
    damage(monkeypatch, "_quantize_kernel", "griddepcontrol.wait;", "")
    with (
        pytest.raises(HazardError, match="without griddepcontrol.wait between them"),
        emulated_triton(Options(overlap=True)),
    ):
        rms_norm(torch.ones(3, 448), None, 1e-6, out=wide[:, 64:])
        quantize(wide[:, 128:384], Rows.allocate(3, 256, 8, "cpu"))


def test_a_missing_barrier_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    damage(monkeypatch, "_rms_norm", "bar.sync \t0;", "")
    with pytest.raises(HazardError):
        normed_and_quantised(Options())


def test_kernels_written_for_the_interpreter_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_launch, "INTERPRETED", tl.constexpr(True))
    with pytest.raises(UnsupportedError, match="TRITON_INTERPRET"), emulated_triton():
        pass


def test_options_of_triton_are_kept() -> None:
    with emulated_triton(Options(mode="random", seed=3)) as emulator:
        assert emulator.options == replace(Options(mode="random", seed=3), equal_writes=True, init_fence=False)
