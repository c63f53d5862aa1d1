"""Local memory: arrays that each thread has for itself."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.sm100.emulator import HazardError, MemoryFaultError, emulated
from tests.sm100.support.snippets import LANES, launch


def run(statement: str) -> None:
    launch(f".local .align 16 .b8 depot[32];\nmov.b64 %q0, depot; mov.u32 %r0, 1;\n{statement}\nret;", [])


def test_accesses_stay_inside_what_was_written() -> None:
    run("st.local.b32 [%q0+28], %r0; ld.local.b32 %r1, [%q0+28];")
    with pytest.raises(HazardError, match="never written"):
        run("st.local.b32 [%q0+24], %r0; ld.local.b32 %r1, [%q0+28];")
    for address in ("%q0+32", "%q0+-4"):
        with pytest.raises(MemoryFaultError, match="local access"):
            run(f"st.local.b32 [{address}], %r0;")
    with pytest.raises(MemoryFaultError, match="misaligned"):
        run("st.local.b32 [%q0+2], %r0;")


def test_generic_addresses() -> None:
    """Generic addresses of local and of global memory in one kernel; each lane finds its own."""
    out = np.zeros(LANES, np.uint32)
    body = """.local .align 16 .b8 depot[32];
    mov.b64 %q0, depot; cvta.local.u64 %q1, %q0; mov.u32 %r0, %tid.x;
    st.b32 [%q1+8], %r0; ld.local.b32 %r1, [%q0+8]; ld.b32 %r2, [%q1+8]; add.u32 %r1, %r1, %r2;
    cvta.to.local.u64 %q2, %q1; st.local.b8 [%q2+9], 1; ld.b32 %r2, [%q1+8]; add.u32 %r1, %r1, %r2;
    ld.param.b64 %q3, [p0]; cvta.global.u64 %q3, %q3; mad.wide.u32 %q3, %r0, 4, %q3; st.b32 [%q3], %r1; ret;"""
    launch(body, [out])
    assert out.tolist() == [3 * lane + 256 for lane in range(LANES)]
    with pytest.raises(MemoryFaultError, match="cvta.to.local"):
        run("cvta.to.local.u64 %q1, %q0;")


def test_register_arrays_indexed_at_run_time() -> None:
    import cuda.bindings.driver as cuda  # type: ignore[import-untyped]
    from cutlass.cute.runtime import from_dlpack

    from tests.sm100.support.register_arrays import SIZE, THREADS, compiled_permute

    compiled = compiled_permute()
    assert "st.local" in compiled.ptx
    random = np.random.default_rng(1)
    places = np.stack([random.permutation(SIZE) for _ in range(THREADS)])
    source = torch.arange(THREADS * SIZE, dtype=torch.float32)
    target = torch.zeros(THREADS * SIZE)
    tensors = source, torch.from_numpy(places.astype(np.int32).ravel()), target
    with emulated(reads=tensors[:2], writes=[target]) as emulator:
        emulator(compiled, *(from_dlpack(tensor, assumed_align=16) for tensor in tensors), cuda.CUstream(0))
    expected = np.zeros((THREADS, SIZE), np.float32)
    np.put_along_axis(expected, places, source.numpy().reshape(THREADS, SIZE), axis=1)
    assert np.array_equal(target.numpy().reshape(THREADS, SIZE), expected)
