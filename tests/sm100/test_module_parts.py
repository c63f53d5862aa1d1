"""What a PTX file holds beside instructions: tables in global memory, tables of labels, descriptions of the source."""

from __future__ import annotations

import numpy as np
import pytest

from tests.sm100.emulator.errors import HazardError, MemoryFaultError, UnsupportedError
from tests.sm100.emulator.ptx import parse
from tests.sm100.support.snippets import LANES, evaluate, kernel_text, launch

BY_LANE = "mov.u32 %r0, %tid.x; ld.param.b64 %q0, [p0]; mad.wide.u32 %q0, %r0, 4, %q0;\n"
TABLE = ".global .align 4 .b8 numbers[12] = {1, 0, 0, 0, 2, 1, 0, 0};\n"


def test_tables_are_read_as_global_memory() -> None:
    """What is not listed is 0."""
    out = np.full(LANES, 77, np.uint32)
    body = BY_LANE + "rem.u32 %r1, %r0, 3; mov.b64 %q1, numbers; mad.wide.u32 %q1, %r1, 4, %q1;\n"
    launch(body + "ld.global.nc.b32 %r2, [%q1]; st.global.b32 [%q0], %r2; ret;", [out], before=TABLE)
    assert out.tolist() == [[1, 258, 0][lane % 3] for lane in range(LANES)]


def test_tables_are_not_written_and_end() -> None:
    with pytest.raises(MemoryFaultError, match=r"numbers\+4: read-only"):
        launch("mov.b64 %q1, numbers; st.global.b32 [%q1+4], 5; ret;", [], before=TABLE)
    with pytest.raises(MemoryFaultError, match="outside numbers"):
        launch("mov.b64 %q1, numbers; ld.global.b32 %r0, [%q1+12]; ret;", [], before=TABLE)
    with pytest.raises(UnsupportedError, match="module level"):
        parse(kernel_text("ret;", 0) + ".global .align 64 .b8 wide[64] = {1};")
    with pytest.raises(UnsupportedError, match="module level"):
        parse(kernel_text("ret;", 0) + ".global .align 4 .u32 counter;")


def test_lanes_go_where_their_index_says() -> None:
    index = np.arange(LANES, dtype=np.uint32) * 5 % 3
    code = """table: .branchtargets ZERO,
        ONE, TWO;
    brx.idx {0}, table;
    ZERO: mov.u32 {out}, 100; bra DONE;
    ONE: mov.u32 {out}, 101; bra DONE;
    TWO: mov.u32 {out}, 102;
    DONE:"""
    assert evaluate(code, [index], "u4").tolist() == (100 + index).tolist()
    assert evaluate(code, [np.full(LANES, 2, np.uint32)], "u4").tolist() == [102] * LANES
    with pytest.raises(HazardError, match="branch number 3 of 3"):
        evaluate(code, [index + np.uint32(1)], "u4")


def test_a_guarded_branch_leaves_the_other_lanes() -> None:
    lane = np.arange(LANES, dtype=np.uint32)
    code = """mov.u32 {out}, 0; setp.ge.u32 %p1, {0}, 30; sub.u32 %r20, {0}, 30;
    table: .branchtargets FIRST, SECOND;
    @%p1 brx.idx %r20, table;
    bra DONE;
    FIRST: mov.u32 {out}, 1; bra DONE;
    SECOND: mov.u32 {out}, 2;
    DONE:"""
    assert evaluate(code, [lane], "u4").tolist() == [0] * 30 + [1, 2]


def test_labels_and_tables_must_be_in_reach() -> None:
    for statements in ("brx.idx %r0, table;", "table: .branchtargets NOWHERE; brx.idx %r0, table;"):
        with pytest.raises(UnsupportedError, match="in reach"):
            launch(f"mov.u32 %r0, 0; {statements}\nret;", [])


def test_descriptions_of_the_source_are_skipped_and_lines_counted() -> None:
    described = """.loc 1 242 0
    $L__tmp0: .loc 2 32 9, function_name $L__info, inlined_at 1 244 5 // file.py:32:9
    frobnicate.b32 %r0;"""
    text = '.file 1 "/a folder/file.py"\n' + kernel_text("ret;", 0).replace("ret;", "\n    .loc 1 2 3\n    ret;")
    text += "\t.section\t.debug_abbrev\n\t{\n.b8 1 // code\n.b64 $L__tmp0\n\t}\n\t.section .debug_macinfo\t{\t}\n"
    (kernel,) = parse(text).kernels.values()
    assert kernel.instructions[0].opcode == ("ret",)
    assert text.splitlines()[kernel.instructions[0].line - 1].strip() == "ret;"
    with pytest.raises(UnsupportedError, match=r"frobnicate") as caught:
        launch(described, [])
    assert "line" in str(caught.value)
