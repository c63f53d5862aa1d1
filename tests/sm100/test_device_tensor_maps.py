"""Tensor maps changed by the kernel: fields, the order that the tensormap proxy asks for, a real grouped GEMM."""

from __future__ import annotations

import numpy as np
import pytest

from tests.sm100.emulator import HazardError, MemoryFaultError, Options, UnsupportedError
from tests.sm100.emulator.tensor_map import replace_field
from tests.sm100.support.raw_tensor_map import raw_map
from tests.sm100.support.snippets import launch

BEFORE = raw_map(1, [64, 4, 3], [128, 512], [16, 2, 1])


@pytest.mark.parametrize(("name", "position", "value", "after"), [
    ("global_address", 0, 0x7F0012345670, raw_map(1, [64, 4, 3], [128, 512], [16, 2, 1], address=0x7F0012345670)),
    ("global_dim", 0, 56, raw_map(1, [56, 4, 3], [128, 512], [16, 2, 1])),
    ("global_dim", 2, 2**32 - 1, raw_map(1, [64, 4, 2**32 - 1], [128, 512], [16, 2, 1])),
    ("global_stride", 0, 4096, raw_map(1, [64, 4, 3], [4096, 512], [16, 2, 1])),
    ("global_stride", 1, 2**35, raw_map(1, [64, 4, 3], [128, 2**35], [16, 2, 1])),
    ("box_dim", 1, 256, raw_map(1, [64, 4, 3], [128, 512], [16, 256, 1])),
    ("rank", 0, 3, raw_map(1, [64, 4, 3, 1], [128, 512, 0], [16, 2, 1, 1])),
    ("element_stride", 1, 1, BEFORE),
])  # fmt: skip
def test_replaced_fields_are_those_of_a_map_made_on_the_host(
    name: str, position: int, value: int, after: bytes
) -> None:
    assert replace_field(BEFORE, name, position, value) == after


@pytest.mark.parametrize(("name", "position", "value"), [
    ("global_stride", 0, 24), ("global_stride", 0, 2**36), ("global_stride", 4, 16), ("global_dim", 5, 16),
    ("box_dim", 0, 0), ("box_dim", 0, 257), ("rank", 0, 5),
])  # fmt: skip
def test_values_out_of_range_are_refused(name: str, position: int, value: int) -> None:
    with pytest.raises(MemoryFaultError, match=name.removeprefix("global_").removesuffix("_dim")):
        replace_field(BEFORE, name, position, value)


def test_element_strides_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="element stride"):
        replace_field(BEFORE, "element_stride", 0, 2)


REPLACE = "tensormap.replace.tile.global_address.global.b1024.b64 [%q0], %q1;"
RELEASE = "fence.proxy.tensormap::generic.release.gpu;"
ACQUIRE = "fence.proxy.tensormap::generic.acquire.gpu [%q0], 128;"
IN_SHARED = """ld.global.v4.b32 {%r20, %r21, %r22, %r23}, [%q0]; st.shared.v4.b32 [%r1+256], {%r20, %r21, %r22, %r23};
    ld.global.v4.b32 {%r20, %r21, %r22, %r23}, [%q0+16]; st.shared.v4.b32 [%r1+272], {%r20, %r21, %r22, %r23};
    ld.global.v4.b32 {%r20, %r21, %r22, %r23}, [%q0+32]; st.shared.v4.b32 [%r1+288], {%r20, %r21, %r22, %r23};
    ld.global.v4.b32 {%r20, %r21, %r22, %r23}, [%q0+48]; st.shared.v4.b32 [%r1+304], {%r20, %r21, %r22, %r23};
    tensormap.replace.tile.global_address.shared::cta.b1024.b64 [%r1+256], %q1;
    tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned [%q0], [%r1+256], 128;"""
COPY = """mbarrier.arrive.expect_tx.shared.b64 _, [%r1+512], 64;
    cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes [%r1], [%q0, {%r0, %r0}], [%r1+512];"""
WAIT = """WAIT: mbarrier.try_wait.parity.shared.b64 %p1, [%r1+512], 0;
    @!%p1 bra WAIT;"""


def load_through(*steps: str, options: Options | None = None) -> np.ndarray:
    """Run ``steps`` on one warp, %q0 being a map of a 4 by 16 tensor of 32 bits elsewhere, %q1 the tensor's address.

    The tensor is then expected in shared memory and returned.
    """
    source = np.arange(64, dtype=np.uint32)
    room, target = np.zeros(256, np.uint8), np.zeros(16, np.uint32)
    room = room[-room.ctypes.data % 128 :][:128]
    room[:] = np.frombuffer(raw_map(2, [16, 4], [64], [4, 4]), np.uint8)
    aligned = np.zeros(80, np.uint32)
    start = -aligned.ctypes.data % 16 // 4
    aligned[start : start + 64] = source
    body = f"""ld.param.b64 %q0, [p0]; ld.param.b64 %q1, [p1]; ld.param.b64 %q2, [p2];
    mov.u32 %r1, dynamic; mov.u32 %r0, 0; mov.u32 %r2, %tid.x;
    setp.ne.s32 %p0, %r2, 0;
    @%p0 bra ALL;
    mbarrier.init.shared.b64 [%r1+512], 1;
    fence.mbarrier_init.release.cluster;
    fence.proxy.async.shared::cta;
    ALL:
    bar.warp.sync -1;
    {{ {" ".join(steps)} }}
    {WAIT}
    shl.b32 %r3, %r2, 2; add.s32 %r4, %r3, %r1; cvt.u64.u32 %q3, %r3; add.s64 %q3, %q2, %q3;
    setp.gt.s32 %p0, %r2, 15;
    @%p0 ret;
    ld.shared.b32 %r5, [%r4];
    st.global.b32 [%q3], %r5;
    ret;"""
    launch(body, [room, aligned[start : start + 64], target], shared=1024, options=options)
    return target


ONE = "setp.eq.s32 %p2, %r2, 0; @!%p2 bra LATER;"
ONCE = "LATER: bar.warp.sync -1;"
EXPECTED = np.arange(64, dtype=np.uint32).reshape(4, 16)[:, :4].ravel()


def test_map_changed_in_global_memory() -> None:
    assert np.array_equal(load_through(ONE, REPLACE, RELEASE, ACQUIRE, COPY, ONCE), EXPECTED)


def test_map_changed_in_shared_memory() -> None:
    assert np.array_equal(load_through(IN_SHARED, ONE, ACQUIRE, COPY, ONCE), EXPECTED)


@pytest.mark.parametrize(("steps", "message"), [
    ((ONE, REPLACE, ACQUIRE, COPY, ONCE), "did not release"),
    ((ONE, RELEASE, REPLACE, ACQUIRE, COPY, ONCE), "did not release"),
    ((ONE, REPLACE, RELEASE, ACQUIRE, REPLACE, COPY, ONCE), "did not release"),
    ((ONE, REPLACE, RELEASE, COPY, ONCE), "not acquired"),
    ((ONE, REPLACE, ACQUIRE, RELEASE, COPY, ONCE), "not acquired"),
    ((ONE, ACQUIRE, ONCE, IN_SHARED, ONE.replace("LATER", "THEN"), COPY, ONCE.replace("LATER", "THEN")),
     "not acquired"),
    ((ONE, REPLACE, RELEASE, ACQUIRE.replace("q0]", "q0+64]"), COPY, ONCE), "not acquired"),
], ids=["no release", "early release", "rewritten", "no acquire", "late release", "early", "elsewhere"])  # fmt: skip
def test_missing_fences_are_reported(steps: tuple[str, ...], message: str) -> None:
    with pytest.raises(HazardError, match=message):
        load_through(*steps)


def test_a_map_in_use_must_not_change() -> None:
    steps = ONE, REPLACE, RELEASE, ACQUIRE, COPY, REPLACE, ONCE
    with pytest.raises(HazardError, match="under way"):
        load_through(*steps, options=Options("starved", 1, "tma_load"))


def test_copies_take_no_map_from_shared_memory() -> None:
    shared = "cvt.u64.u32 %q9, %r1; cvta.shared.u64 %q9, %q9; add.s64 %q0, %q9, 256;"
    with pytest.raises(MemoryFaultError, match="from shared memory"):
        load_through(IN_SHARED, ONE, shared, COPY, ONCE)


# Ragged, two groups of different shapes: a CTA changes its maps between tiles.
GROUPS = [(200, 136, 256), (40, 264, 320)]


@pytest.mark.parametrize(("tile", "cluster", "active", "options"), [
    ((128, 128), (1, 1), 1, Options()),
    ((128, 128), (1, 1), 2, Options("random", 1)),
    ((256, 128), (2, 1), 1, Options("random", 2)),
], ids=["one CTA", "two CTAs, random", "pair, random"])  # fmt: skip
def test_installed_grouped_gemm(tile: tuple[int, int], cluster: tuple[int, int], active: int, options: Options) -> None:
    pytest.importorskip("flashinfer")
    from tests.sm100.support.grouped_gemm import run_grouped_gemm

    right, statistics = run_grouped_gemm(tile, cluster, GROUPS, active, options)
    assert right
    counts = statistics.by_opcode()
    copies = sum(number for opcode, number in counts.items() if opcode.startswith("tensormap.cp_fenceproxy"))
    assert copies >= 5 * len(GROUPS)


@pytest.mark.parametrize(("old", "new", "message"), [
    ("fence.proxy.tensormap::generic.acquire.gpu [%rd51], 128;", "", "not acquired"),
    ("tensormap.replace.tile.global_dim.shared::cta.b1024.b32 	[%r247], 1, %r935;", "", None),
    ("tensormap.replace.tile.global_stride.shared::cta.b1024.b64 	[%r248], 0, %rd45;", "", None),
], ids=["no acquire", "old extent", "old stride"])  # fmt: skip
def test_planted_bugs_of_the_grouped_gemm(old: str, new: str, message: str | None) -> None:
    pytest.importorskip("flashinfer")
    from tests.sm100.support.grouped_gemm import run_grouped_gemm

    if message is None:
        assert not run_grouped_gemm((128, 128), (1, 1), GROUPS, 1, Options(), (old, new))[0]
        return
    with pytest.raises(HazardError, match=message):
        run_grouped_gemm((128, 128), (1, 1), GROUPS, 1, Options(), (old, new))
