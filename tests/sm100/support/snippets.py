"""Runs a few PTX instructions on one warp (or more) in the emulator and returns what they computed."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from tests.sm100.emulator.engines import Options
from tests.sm100.emulator.launch import Launch
from tests.sm100.emulator.memory import GlobalMemory, Range
from tests.sm100.emulator.ptx import parse
from tests.sm100.emulator.stream import Stream

LANES = 32
HEADER = ".version 9.0\n.target {target}\n.address_size 64\n.extern .shared .align 1024 .b8 dynamic[];\n"


def kernel_text(body: str, parameters: int, target: str = "sm_100a", registers: int = 64, before: str = "") -> str:
    """A kernel with u64 parameters p0, p1, … and registers %p, %h, %r, %q (pred, 16, 32, 64 bits), so many of each.

    ``before`` is what the PTX file holds before the kernel.
    """
    declared = ", ".join(f".param .u64 p{i}" for i in range(parameters))
    names = {"pred": "p", "b16": "h", "b32": "r", "b64": "q"}
    declarations = "".join(f".reg .{kind} %{name}<{registers}>;\n" for kind, name in names.items())
    header = HEADER.format(target=target) + before
    return f"{header}.visible .entry kernel({declared})\n{{\n{declarations}{body}\n}}\n"


def make_launch(
    body: str,
    buffers: list[np.ndarray],
    *,
    before: str = "",
    target: str = "sm_100a",
    registers: int = 64,
    options: Options | None = None,
    block: int = LANES,
    grid: int = 1,
    cluster: int = 1,
    shared: int = 0,
    stream: Stream | None = None,
) -> Launch:
    """A launch of ``body``; parameter i is the address of ``buffers[i]``, all of them writable.

    ``before``, ``target`` and ``registers`` are as ``kernel_text`` takes them.
    """
    ranges = [Range(b.ctypes.data, b.ctypes.data + b.nbytes, True, f"p{i}") for i, b in enumerate(buffers)]
    values = [bytes(ctypes.c_uint64(b.ctypes.data)) for b in buffers]
    text = kernel_text(body, len(buffers), target, registers, before)
    kernel = parse(text).kernels["kernel"]
    memory = GlobalMemory(ranges)
    if stream is not None:
        memory = stream.memory(memory)
    shapes = (grid, 1, 1), (block, 1, 1), (cluster, 1, 1)
    return Launch(kernel, *shapes, shared, values, memory, options or Options())


def launch(body: str, buffers: list[np.ndarray], **keywords: Any) -> Launch:
    """Run ``make_launch`` to the end."""
    made = make_launch(body, buffers, **keywords)
    made.run()
    return made


WIDTHS = {8: "h", 16: "h", 32: "r", 64: "q"}


def evaluate(code: str, inputs: list[np.ndarray], output: str) -> np.ndarray:
    """Run ``code`` on 32 lanes.

    Input i of the code is ``{0}``, ``{1}``, … (a register of the array's width, one element a lane) and its result
    is ``{out}`` (a register of the width of ``output``).
    """
    result = np.zeros(LANES, output)
    lines = ["mov.u32 %r60, %tid.x;", "cvt.u64.u32 %q60, %r60;"]
    names = []
    for index, values in enumerate(inputs):
        assert values.shape == (LANES,)
        bits = 8 * values.itemsize
        name = f"%{WIDTHS[bits]}{index}"
        lines += [
            f"ld.param.b64 %q61, [p{index}];",
            f"mad.lo.s64 %q61, %q60, {values.itemsize}, %q61;",
            f"ld.global.b{bits} {name}, [%q61];",
        ]
        names.append(name)
    bits = 8 * result.itemsize
    out = f"%{WIDTHS[bits]}50"
    lines += [
        code.format(*names, out=out),
        f"ld.param.b64 %q61, [p{len(inputs)}];",
        f"mad.lo.s64 %q61, %q60, {result.itemsize}, %q61;",
        f"st.global.b{bits} [%q61], {out};",
        "ret;",
    ]
    launch("\n".join(lines), [np.ascontiguousarray(v) for v in inputs] + [result])
    return result
