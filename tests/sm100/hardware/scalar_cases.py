"""Integer, floating-point and conversion instructions, each on hundreds of operands with all the hard ones."""

from __future__ import annotations

from tests.sm100.hardware.case import Case
from tests.sm100.hardware.instruction_table import Snippet, table_case


def _binary(*opcodes: str, operands: str, width: int = 32) -> list[Snippet]:
    return [Snippet(f"{opcode} d, a, b;", operands, width) for opcode in opcodes]


def _unary(*opcodes: str, operands: str, width: int = 32) -> list[Snippet]:
    return [Snippet(f"{opcode} d, a;", operands, width) for opcode in opcodes]


def _ternary(*opcodes: str, operands: str, width: int = 32) -> list[Snippet]:
    return [Snippet(f"{opcode} d, a, b, c;", operands, width) for opcode in opcodes]


def _compare(*opcodes: str, operands: str) -> list[Snippet]:
    return [Snippet(f"{opcode} p, a, b; selp.b32 d, 1, 0, p;", operands) for opcode in opcodes]


_HALVES = ".reg .b16 x, y; cvt.u16.u32 x, a; cvt.u16.u32 y, b;"
"""The low halves of two operands."""

INTEGER = [
    *_binary("add.s32", "sub.s32", "mul.lo.s32", "mul.hi.s32", "mul.hi.u32", "and.b32", "or.b32", "xor.b32",
             "min.s32", "max.s32", "min.u32", "max.u32", operands="i0 i1"),
    # Division by zero is left open by PTX: operands with a zero divisor are made odd.
    *[Snippet(f"or.b32 t, b, 1; {opcode} d, a, t;", "i0 i1", label=opcode)
      for opcode in ("div.s32", "div.u32", "rem.s32", "rem.u32")],
    *_unary("not.b32", "neg.s32", "abs.s32", "popc.b32", "clz.b32", "brev.b32", "bfind.u32", operands="i0"),
    *_ternary("mad.lo.s32", "mad.hi.s32", "mad.hi.u32", "prmt.b32", operands="i0 i1 i2"),
    *_binary("shl.b32", "shr.u32", "shr.s32", operands="i0 n"),
    *_ternary("shf.l.wrap.b32", "shf.l.clamp.b32", "shf.r.wrap.b32", "shf.r.clamp.b32", operands="i0 i1 n"),
    *_ternary("bfe.u32", operands="i0 n i1"),
    *[Snippet(f"lop3.b32 d, a, b, c, {table:#x};", "i0 i1 i2", label=f"lop3 {table:#x}")
      for table in (0x80, 0xFE, 0x96, 0xE8, 0xCA, 0x1D, 0x6A)],
    *_compare("setp.eq.s32", "setp.ne.s32", "setp.lt.s32", "setp.le.s32", "setp.gt.s32", "setp.ge.s32",
              "setp.lt.u32", "setp.le.u32", "setp.gt.u32", "setp.ge.u32", operands="i0 i1"),
    Snippet("setp.lt.s32 p, a, b; setp.lt.s32 q, b, c; or.pred p, p, q; mov.pred q, p; not.pred q, q;"
            " mov.f32 d, a; selp.f32 d, d, b, q;", "i0 i1 i2", label="or.pred"),
    Snippet("setp.lt.s32 q, b, c; setp.gt.and.s32 p, a, b, q; selp.b32 d, a, c, p;", "i0 i1 i2", label="setp.gt.and"),
    Snippet("setp.lt.s32 q, b, c; setp.ne.and.s32 p, a, b, q; selp.b32 d, a, c, p;", "i0 i1 i2", label="setp.ne.and"),
]  # fmt: skip

OTHER_WIDTHS = [
    *_binary("mul.wide.s32", "mul.wide.u32", operands="i0 i1", width=64),
    *_binary("add.s64", "sub.s64", "mul.lo.s64", "mul.hi.s64", "mul.hi.u64", "and.b64", "or.b64", "xor.b64",
             "min.s64", "max.u64", operands="q0 q1", width=64),
    *_unary("neg.s64", "abs.s64", operands="q0", width=64),
    *_ternary("mad.wide.s32", "mad.wide.u32", operands="i0 i1 q0", width=64),
    *_ternary("mad.lo.s64", operands="q0 q1 q2", width=64),
    *_binary("shl.b64", "shr.u64", "shr.s64", operands="q0 n", width=64),
    *_compare("setp.lt.s64", "setp.ge.u64", operands="q0 q1"),
    Snippet(f"{_HALVES} and.b16 y, x, y; setp.ne.b16 p, x, y; selp.b32 d, 1, 0, p;", "i0 i1", label="setp.ne.b16"),
    Snippet(f"{_HALVES} setp.lt.s16 p, x, y; selp.b16 x, y, x, p; cvt.u32.u16 d, x;", "i0 i1", label="selp.b16"),
    *[Snippet(f"{_HALVES} {opcode} x, x, y; cvt.u32.u16 d, x;", "i0 i1", label=opcode)
      for opcode in ("add.s16", "sub.s16", "mul.lo.s16", "mul.hi.s16", "min.s16", "max.u16", "or.b16", "xor.b16")],
    *[Snippet(f"{_HALVES} {opcode} x, x, b; cvt.u32.u16 d, x;", "i0 n", label=opcode)
      for opcode in ("shl.b16", "shr.u16", "shr.s16")],
    *[Snippet(f"{_HALVES} {opcode} d, x, y;", "i0 i1", label=opcode) for opcode in ("mul.wide.s16", "mul.wide.u16")],
    Snippet(f"{_HALVES} cvt.s16.s8 x, y; cvt.u32.u16 d, x;", "i0 i1", label="cvt.s16.s8"),
    *_unary("cvt.s8.s32", operands="i0"),
]  # fmt: skip
"""Integers of 16 and 64 bits."""

FLOAT = [
    *_binary("add.f32", "add.ftz.f32", "add.sat.f32", "sub.f32", "sub.ftz.f32", "mul.f32", "mul.ftz.f32",
             "mul.sat.f32", "div.rn.f32", "min.f32", "max.f32", "min.NaN.f32", "max.NaN.f32", "min.ftz.f32",
             "max.ftz.f32", "min.ftz.NaN.f32", operands="f0 f1"),
    *_ternary("fma.rn.f32", "fma.rn.ftz.f32", "fma.rn.sat.f32", operands="f0 f1 f2"),
    *[Snippet(f"mov.b32 t, 0; {opcode} d, a, b, t;", "f0 f1", label=f"{opcode} with zero")
      for opcode in ("fma.rn.f32", "fma.rn.ftz.f32")],
    *_ternary("fma.rn.ftz.f32", operands="f0 f1 f0"),
    *_unary("rcp.rn.f32", "sqrt.rn.f32", operands="f0"),
    *[Snippet(f"{opcode} d, a;", "f2", label=f"{opcode} f2") for opcode in ("rcp.rn.f32", "sqrt.rn.f32")],
    *_unary("neg.f32", "abs.f32", "neg.ftz.f32", "abs.ftz.f32", operands="f0"),
    *_compare(*(f"setp.{name}.f32" for name in ("eq", "ne", "lt", "le", "gt", "ge", "equ", "neu", "ltu", "leu",
                                                "gtu", "geu", "num", "nan")),
              "setp.lt.ftz.f32", "setp.eq.ftz.f32", operands="f0 f1"),
]  # fmt: skip

CONVERSIONS = [
    *_unary("cvt.rn.bf16.f32", "cvt.rn.f16.f32", operands="c0", width=16),
    *[Snippet(f"{opcode} d, a;", "f0", 16) for opcode in ("cvt.rn.bf16.f32", "cvt.rn.f16.f32")],
    *_binary("cvt.rn.bf16x2.f32", "cvt.rn.f16x2.f32", "cvt.rn.relu.bf16x2.f32", "cvt.rn.relu.f16x2.f32",
             operands="c0 c1"),
    *_binary("cvt.rn.satfinite.e4m3x2.f32", "cvt.rn.satfinite.e5m2x2.f32", "cvt.rn.satfinite.relu.e4m3x2.f32",
             "cvt.rn.satfinite.relu.e5m2x2.f32", operands="c0 c1", width=16),
    *_unary("cvt.rn.f16x2.e4m3x2", "cvt.rn.f16x2.e5m2x2", "cvt.f32.f16", "cvt.f32.bf16", operands="h"),
    *_unary(*(f"cvt.{mode}.{target}.f32" for mode in ("rni", "rzi", "rmi", "rpi") for target in ("s32", "u32")),
            *(f"cvt.{mode}.f32.f32" for mode in ("rni", "rzi", "rmi", "rpi")), "cvt.rzi.ftz.s32.f32", operands="c0"),
    *_unary("cvt.rni.s64.f32", "cvt.rzi.u64.f32", "cvt.f64.f32", operands="f0", width=64),
    *_unary("cvt.rn.f32.s32", "cvt.rn.f32.u32", operands="i0"),
    *_unary("cvt.rn.f32.s64", "cvt.rn.f32.u64", "cvt.rn.f32.f64", operands="q2"),
    *_unary("cvt.u64.u32", "cvt.s64.s32", operands="i0", width=64),
    *_unary("cvt.u32.u16", "cvt.s32.s16", operands="h"),
    *_unary("cvt.u32.u8", "cvt.s32.s8", operands="i0"),
    *_unary("cvt.u16.u32", "cvt.sat.s16.s32", operands="i0", width=16),
]  # fmt: skip

HALF = [
    snippet
    for kind, columns in (("f16x2", "g0 g1 g2"), ("bf16x2", "b0 b1 b2"))
    for snippet in (
        *_binary(*(f"{name}.{kind}" for name in ("add", "sub", "mul", "min", "max", "min.NaN", "max.NaN")),
                 operands=columns[:5]),
        *_ternary(f"fma.rn.{kind}", f"fma.rn.relu.{kind}", operands=columns),
        *_unary(f"neg.{kind}", f"abs.{kind}", operands=columns[:2]),
    )
]  # fmt: skip

APPROXIMATE = {
    "ex2.approx.f32": 2, "ex2.approx.ftz.f32": 2, "rcp.approx.f32": 1, "rcp.approx.ftz.f32": 1,
    "rsqrt.approx.f32": 1, "rsqrt.approx.ftz.f32": 1, "sqrt.approx.f32": 1, "sqrt.approx.ftz.f32": 1,
    "tanh.approx.f32": 128,
}  # fmt: skip
APPROXIMATE_DIVISIONS = {"div.approx.ftz.f32": 1, "div.full.f32": 1, "div.full.ftz.f32": 1}
"""What the hardware's result may be off by, in units in the last place."""


def cases() -> list[Case]:
    """All of the above."""
    unary = _unary(*APPROXIMATE, operands="m0")
    divisions = _binary(*APPROXIMATE_DIVISIONS, operands="m0 m1")
    limits = {snippet.name: {**APPROXIMATE, **APPROXIMATE_DIVISIONS}[snippet.ptx.split(" ")[0]]
              for snippet in (*unary, *divisions)}  # fmt: skip
    return [
        table_case("integer", INTEGER),
        table_case("integer of other widths", OTHER_WIDTHS),
        table_case("float", FLOAT),
        table_case("conversion", CONVERSIONS),
        table_case("half", HALF),
        table_case("approximate", [*unary, *divisions], limits),
    ]
