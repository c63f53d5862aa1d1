"""Experts on Hopper, launched as programmatic dependents, wait for the kernel that makes their tokens.

That which counts them has ended by then, since the one between waits for it.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from nvfp4_sgl.cutedsl_kernels.sm90.shape import KernelShape
from tests.sm90.support.products import ExpertCase, compile_shape, span
from tests.sm100.emulator import Compiled, HazardError, Options, emulated
from tests.sm100.support.snippets import make_launch

MODES = {"immediate": Options(overlap=True), "random": Options("random", 1, overlap=True)}
GATE_UP = ExpertCase(KernelShape(8, gated=True, grouped=True), (3, 0, 8), features=64, k=128)
DOWN = ExpertCase(KernelShape(8, grouped=True), GATE_UP.counts, features=72, k=GATE_UP.features)
WAIT = "griddepcontrol.wait;"
TOO_EARLY = r"without griddepcontrol\.wait"

ROUTE = """mov.u32 %r0, %tid.x; ld.param.b64 %q0, [p0]; ld.param.b64 %q1, [p1];
    griddepcontrol.launch_dependents;
    setp.ge.u32 %p0, %r0, {words};
    @%p0 ret;
    mad.wide.u32 %q2, %r0, 4, %q0; mad.wide.u32 %q3, %r0, 4, %q1;
    ld.global.b32 %r1, [%q2]; st.global.b32 [%q3], %r1; ret;"""
"""Copies offsets and counts to where the next kernels read them, as the last thing it does."""
SCATTER = """mov.u32 %r0, %tid.x; ld.param.b64 %q0, [p0]; ld.param.b64 %q1, [p1];
    {begin}
    mov.u32 %r2, {words};
LOOP:
    setp.ge.u32 %p0, %r0, %r2;
    @%p0 ret;
    mad.wide.u32 %q2, %r0, 4, %q0; mad.wide.u32 %q3, %r0, 4, %q1;
    ld.global.b32 %r1, [%q2]; st.global.b32 [%q3], %r1;
    add.s32 %r0, %r0, 32;
    bra LOOP;"""
"""Copies tokens to where the experts read them."""
WAIT_FIRST = "griddepcontrol.wait; griddepcontrol.launch_dependents;"
WAIT_LAST = "griddepcontrol.launch_dependents; griddepcontrol.wait;"


def run_layer(
    options: Options, gate_up: Compiled | None = None, down: Compiled | None = None, begin: str = WAIT_FIRST
) -> tuple[Tensor, Tensor]:
    """Routing, scattering, gates and ups, down, each after the other: outputs of the last two.

    Args:
        begin: what the scattering kernel begins with.
    """
    (first, _), (second, _) = GATE_UP.build(), DOWN.build()
    assert first.offsets is not None and first.counts is not None
    known = torch.stack([first.offsets, first.counts])
    routes, source, rows = torch.zeros_like(known), span(first.tokens), torch.full_like(span(first.tokens), torch.nan)
    strides = first.tokens.stride()
    first = replace(first, tokens=rows.as_strided(first.tokens.shape, strides), offsets=routes[0], counts=routes[1])
    second = replace(second, tokens=first.out, offsets=routes[0], counts=routes[1])
    reads = [first.weights, source, first.alpha, second.weights, second.alpha]
    with emulated(options, reads=[span(t) for t in reads], writes=[routes, rows, first.out, second.out]) as emulator:
        body, buffers = ROUTE.format(words=known.numel()), [known.numpy(), routes.numpy()]
        route = make_launch(body, buffers, target="sm_90a", options=options, stream=emulator.stream)
        emulator.stream.submit(route, programmatic=False)
        body = SCATTER.format(begin=begin, words=source.numel() // 2)
        buffers = [source.view(torch.int32).numpy(), rows.view(torch.int32).numpy()]
        scatter = make_launch(body, buffers, target="sm_90a", options=options, stream=emulator.stream)
        emulator.stream.submit(scatter, programmatic=True)
        emulator(gate_up or compile_shape(first.shape), first.arguments(2), 0)
        emulator(down or compile_shape(second.shape), second.arguments(2), 0)
    GATE_UP.compare(first, GATE_UP.build()[1])
    DOWN.compare(second, DOWN.build()[1])
    return first.out, second.out


@pytest.mark.parametrize("mode", MODES)
def test_each_kernel_takes_what_those_before_it_write(mode: str) -> None:
    alone = run_layer(Options())
    for found, expected in zip(run_layer(MODES[mode]), alone, strict=True):
        for rows in GATE_UP.rows():
            assert torch.equal(found[rows], expected[rows]) and expected[rows].isfinite().all()


@pytest.mark.parametrize("kernel", ["gate_up", "down"])
def test_experts_need_their_waits(kernel: str) -> None:
    """The load warp's, before it reads tokens."""
    compiled = compile_shape({"gate_up": GATE_UP, "down": DOWN}[kernel].shape)
    mutant: dict[str, Any] = {kernel: compiled.patched(WAIT, "", 2)}
    with pytest.raises(HazardError, match=TOO_EARLY):
        run_layer(MODES["immediate"], **mutant)


def test_the_counts_need_a_kernel_that_waits_before_it_lets_the_experts_begin() -> None:
    """They are read before the experts' kernels wait for anything."""
    with pytest.raises(HazardError, match=TOO_EARLY):
        run_layer(MODES["immediate"], begin=WAIT_LAST)


def test_experts_read_weights_before_the_kernel_before_has_ended() -> None:
    """The wait of the warp that loads comes after its first loads of weights."""
    text = compile_shape(DOWN.shape).ptx
    load = re.search(r"cp\.async\.bulk\.shared::cluster\.global", text)
    waits = [match.start() for match in re.finditer(re.escape(WAIT), text)]
    assert load is not None and len(waits) == 2 and waits[-1] > load.start()
