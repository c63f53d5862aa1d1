"""mma.sync against a matrix product, with fragments laid out by the PTX ISA's own formulas."""

from __future__ import annotations

import numpy as np
import pytest

from tests.sm100.emulator.errors import HazardError, UnsupportedError
from tests.sm100.emulator.formats import from_bf16, to_bf16
from tests.sm100.support.snippets import LANES, launch

STATEMENT = (
    "mma.sync.aligned.m16n8k16.row.col.f32.{0}.{0}.f32 {{%r0, %r1, %r2, %r3}}, {{%r4, %r5, %r6, %r7}}, {{%r8, %r9}}, "
    "{{%r10, %r11, %r12, %r13}};"
)


def bits(values: np.ndarray, kind: str) -> np.ndarray:
    return to_bf16(values) if kind == "bf16" else values.astype(np.float16).view(np.uint16)


def fragments(matrix: np.ndarray, which: str) -> np.ndarray:
    """[32, elements]: what each lane holds, as the ISA says it element by element."""
    found = np.zeros((LANES, 8 if which == "a" else 4), matrix.dtype)
    for lane in range(LANES):
        group, place = lane >> 2, lane % 4
        for i in range(found.shape[1]):
            if which == "a":
                row = group if i in (0, 1, 4, 5) else group + 8
                column = place * 2 + (i & 1) + (0 if i < 4 else 8)
            elif which == "b":
                row, column = place * 2 + (i & 1) + (0 if i < 2 else 8), group
            else:
                row, column = group if i < 2 else group + 8, place * 2 + (i & 1)
            found[lane, i] = matrix[row, column]
    return found


def run(kind: str, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """D [16, 8]."""
    given = [
        np.ascontiguousarray(fragments(bits(a, kind), "a")).view(np.uint32),
        np.ascontiguousarray(fragments(bits(b, kind), "b")).view(np.uint32),
        fragments(c, "c").view(np.uint32),
    ]
    out = np.zeros((LANES, 4), np.float32)
    body = ["mov.u32 %r60, %tid.x;"]
    register = 4
    for number, values in enumerate(given):
        body.append(f"ld.param.b64 %q0, [p{number}]; mad.wide.u32 %q0, %r60, {4 * values.shape[1]}, %q0;")
        for column in range(values.shape[1]):
            body.append(f"ld.global.b32 %r{register}, [%q0+{4 * column}];")
            register += 1
    body += [STATEMENT.format(kind), "ld.param.b64 %q0, [p3]; mad.wide.u32 %q0, %r60, 16, %q0;"]
    body += ["st.global.v4.b32 [%q0], {%r0,%r1,%r2,%r3}; ret;"]
    launch("\n".join(body), [*given, out])
    product = np.zeros((16, 8), np.float32)
    for lane in range(LANES):
        for i in range(4):
            product[(lane >> 2) + (0 if i < 2 else 8), lane % 4 * 2 + (i & 1)] = out[lane, i]
    return product


@pytest.mark.parametrize("kind", ["bf16", "f16"])
def test_product(kind: str) -> None:
    random = np.random.default_rng(3)
    a, b, c = (random.standard_normal(shape).astype(np.float32) for shape in ((16, 16), (16, 8), (16, 8)))
    a[3, 5], b[7, 2] = 300.0, -(2.0**-10)
    wide = [from_bf16(to_bf16(x)) if kind == "bf16" else x.astype(np.float16).astype(np.float32) for x in (a, b)]
    exact = (wide[0].astype(np.float64) @ wide[1].astype(np.float64) + c).astype(np.float32)
    assert np.array_equal(run(kind, a, b, c), exact)


def test_what_is_refused() -> None:
    other = STATEMENT.format("bf16").replace("m16n8k16", "m16n8k8")
    with pytest.raises(UnsupportedError, match="m16n8k16"):
        launch(f"{other}\nret;", [])
    with pytest.raises(UnsupportedError, match="types"):
        launch(STATEMENT.format("bf16").replace(".f32 {", ".f16 {", 1) + "\nret;", [])
    divergent = f"mov.u32 %r60, %tid.x; setp.lt.u32 %p0, %r60, 4; @%p0 {STATEMENT.format('bf16')}\nret;"
    with pytest.raises(HazardError, match="part of a warp"):
        launch(divergent, [])
