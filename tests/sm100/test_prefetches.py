"""Bulk prefetches change nothing, and name what is there."""

from __future__ import annotations

import numpy as np
import pytest

from tests.sm100.emulator import HazardError, MemoryFaultError, Options, UnsupportedError
from tests.sm100.emulator.launch import Launch
from tests.sm100.emulator.stream import Stream
from tests.sm100.support.raw_tensor_map import raw_map
from tests.sm100.support.snippets import launch, make_launch

HEAD = "mov.u32 %r0, %tid.x; ld.param.b64 %q0, [p0]; ld.param.b64 %q1, [p1]; setp.ne.u32 %p0, %r0, 0; @%p0 ret;"
LINEAR = "cp.async.bulk.prefetch.L2.global [%q0+{}], {};".format
TENSOR = "mov.u32 %r1, {}; mov.u32 %r2, {}; cp.async.bulk.prefetch.tensor.2d.L2.global.tile [%q1, {{%r1, %r2}}];".format


def aligned(nbytes: int) -> np.ndarray:
    """u8 that begins at a multiple of 128."""
    room = np.zeros(nbytes + 128, np.uint8)
    start = -room.ctypes.data % 128
    return room[start : start + nbytes]


def buffers() -> list[np.ndarray]:
    """16 rows of 64 bytes, and a map of them with boxes of 4 rows by 32 bytes."""
    data, described = aligned(1024), aligned(128)
    raw = raw_map(0, [64, 16], [64], [32, 4], address=data.ctypes.data)
    described[:] = np.frombuffer(raw, np.uint8)
    return [data, described]


def prefetched(found: Launch) -> int:
    return found.statistics.engine_bytes["prefetch"]


def test_bytes_that_are_there_are_prefetched() -> None:
    given = buffers()
    before = [buffer.copy() for buffer in given]
    assert prefetched(launch(f"{HEAD} {LINEAR(16, 256)} ret;", given)) == 256
    assert prefetched(launch(f"{HEAD} {TENSOR(32, 4)} ret;", given)) == 128
    hinted = "createpolicy.fractional.L2::evict_last.b64 %q2, 0f3F800000; " + LINEAR(0, 64).replace(
        "global", "global.L2::cache_hint"
    ).replace(";", ", %q2;")
    assert prefetched(launch(f"{HEAD} {hinted} ret;", given)) == 64
    # Of a box at the edge, what is inside.
    assert prefetched(launch(f"{HEAD} {TENSOR(48, 14)} ret;", given)) == 2 * 16
    assert all(np.array_equal(left, right) for left, right in zip(given, before, strict=True))


@pytest.mark.parametrize(("code", "error"), [
    (LINEAR(8, 16), "multiples of 16"), (LINEAR(0, 24), "multiples of 16"), (LINEAR(1008, 32), "outside"),
    (TENSOR(4, 0), "no multiple of 16"),
])  # fmt: skip
def test_what_is_not_there_is_noticed(code: str, error: str) -> None:
    with pytest.raises(MemoryFaultError, match=error):
        launch(f"{HEAD} {code} ret;", buffers())


def test_a_map_with_another_rank_is_refused() -> None:
    code = TENSOR(0, 0).replace("2d", "1d").replace("{%r1, %r2}", "{%r1}")
    with pytest.raises(UnsupportedError, match="1 coordinates"):
        launch(f"{HEAD} {code} ret;", buffers())


def test_a_map_that_was_written_must_be_acquired() -> None:
    with pytest.raises(HazardError, match="use of the tensor map"):
        launch(f"{HEAD} st.global.b32 [%q1+64], 0; {TENSOR(0, 0)} ret;", buffers())


def test_nothing_is_read_that_the_launch_before_may_still_write() -> None:
    """So that weights and other operands may be prefetched before griddepcontrol.wait."""
    options, given = Options(overlap=True), buffers()
    stream = Stream(options)
    first = f"{HEAD} griddepcontrol.launch_dependents; st.global.b32 [%q0], 1; ret;"
    for body in (first, f"{HEAD} {LINEAR(0, 64)} griddepcontrol.wait; ld.global.b32 %r3, [%q0]; ret;"):
        stream.submit(make_launch(body, given, options=options, stream=stream), True)
    stream.synchronize()
