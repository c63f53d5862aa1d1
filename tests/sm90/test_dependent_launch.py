"""Experts on Hopper, launched as programmatic dependents, wait for the kernels that make and count their tokens."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from nvfp4_sgl.cutedsl_kernels.sm90.shape import CONSUMER_WARPS, KernelShape
from tests.sm90.support.products import ExpertCase, ProductCase, compile_anew, compile_shape, run, span
from tests.sm100.emulator import Compiled, HazardError, Options, emulated
from tests.sm100.support.snippets import make_launch

MODES = {"immediate": Options(overlap=True), "random": Options("random", 1, overlap=True)}
GATE_UP = ExpertCase(KernelShape(8, gated=True, grouped=True), (3, 0, 8), features=64, k=128)
GATHERING = replace(GATE_UP, shape=replace(GATE_UP.shape, gathers=True))
DOWN = ExpertCase(KernelShape(8, grouped=True), GATE_UP.counts, features=72, k=GATE_UP.features)
AHEAD = replace(DOWN, shape=replace(DOWN.shape, counts_ahead=True))
WAIT = "griddepcontrol.wait;"
TRIGGER = "griddepcontrol.launch_dependents;"
TOO_EARLY = r"without griddepcontrol\.wait"

ROUTE = """mov.u32 %r0, %tid.x; ld.param.b64 %q0, [p0]; ld.param.b64 %q1, [p1];
    griddepcontrol.launch_dependents;
    setp.ge.u32 %p0, %r0, {words};
    @%p0 ret;
    mad.wide.u32 %q2, %r0, 4, %q0; mad.wide.u32 %q3, %r0, 4, %q1;
    ld.global.b32 %r1, [%q2]; st.global.b32 [%q3], %r1; ret;"""
"""Copies offsets and counts to where the next kernels read them, as the last thing it does."""


def run_layer(
    options: Options,
    gate_up: Compiled | None = None,
    down: Compiled | None = None,
    case: ExpertCase = GATE_UP,
    second_case: ExpertCase = DOWN,
) -> tuple[Tensor, Tensor]:
    """Routing, gates and ups, down, each after the other: outputs of the second kernel and of the third."""
    (first, weights), (second, _) = case.build(), second_case.build()
    assert first.offsets is not None and first.counts is not None
    made = [first.offsets, first.counts, *([] if first.sources is None else [first.sources])]
    known = torch.cat(made)
    routes = torch.zeros_like(known)
    offsets, counts, *sources = routes.split([len(part) for part in made])
    first = replace(first, offsets=offsets, counts=counts, sources=sources[0] if sources else None)
    second = replace(second, tokens=first.out, offsets=offsets, counts=counts)
    reads = [first.weights, first.tokens, first.alpha, second.weights, second.alpha]
    with emulated(options, reads=[span(t) for t in reads], writes=[routes, first.out, second.out]) as emulator:
        body, buffers = ROUTE.format(words=known.numel()), [known.numpy(), routes.numpy()]
        route = make_launch(body, buffers, target="sm_90a", options=options, stream=emulator.stream)
        emulator.stream.submit(route, programmatic=False)
        emulator(gate_up or compile_shape(first.shape), first.arguments(2), 0)
        emulator(down or compile_shape(second.shape), second.arguments(2), 0)
    case.compare(first, weights)
    second_case.compare(second, second_case.build()[1])
    return first.out, second.out


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("down", [DOWN, AHEAD], ids=["counts waited for", "counts ahead"])
@pytest.mark.parametrize("case", [GATE_UP, GATHERING], ids=["sorted rows", "gathered rows"])
def test_each_kernel_takes_what_those_before_it_write(case: ExpertCase, down: ExpertCase, mode: str) -> None:
    alone = run_layer(Options(), case=case)
    for found, expected in zip(run_layer(MODES[mode], case=case, second_case=down), alone, strict=True):
        for rows in GATE_UP.rows():
            assert torch.equal(found[rows], expected[rows]) and expected[rows].isfinite().all()


@pytest.mark.parametrize("kernel", ["gate_up", "down"])
def test_experts_need_their_wait(kernel: str) -> None:
    """There is one, before anything is read of what others write."""
    compiled = compile_shape({"gate_up": GATE_UP, "down": DOWN}[kernel].shape)
    mutant: dict[str, Any] = {kernel: compiled.patched(WAIT, "")}
    with pytest.raises(HazardError, match=TOO_EARLY):
        run_layer(MODES["immediate"], **mutant)


def test_counts_ahead_need_the_wait_in_front_of_the_tokens() -> None:
    compiled = compile_shape(AHEAD.shape)
    both = compiled.patched(WAIT, "", count=2)
    with pytest.raises(HazardError, match=TOO_EARLY):
        run_layer(MODES["immediate"], down=both, second_case=AHEAD)


def test_counts_ahead_need_a_kernel_in_front_that_waits() -> None:
    """Gates and ups that let the next kernel in before they have waited let it read counts that are not there."""
    compiled = compile_shape(GATE_UP.shape)
    early = compiled.patched(WAIT, f"{TRIGGER} {WAIT}")
    with pytest.raises(HazardError, match=TOO_EARLY):
        run_layer(MODES["immediate"], gate_up=early, second_case=AHEAD)
    run_layer(MODES["immediate"], gate_up=early)


def test_gathering_needs_the_first_of_its_waits() -> None:
    """The second, before the first tokens, comes after counts and rows have been read."""
    compiled = compile_shape(GATHERING.shape)
    early = Compiled(compiled.function, compiled.ptx.replace(WAIT, "", 1))
    with pytest.raises(HazardError, match=TOO_EARLY):
        run_layer(MODES["immediate"], gate_up=early, case=GATHERING)


def test_weights_loaded_before_the_counts_are_known_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The order of a kernel without experts: weights, then the wait."""
    from nvfp4_sgl.cutedsl_kernels.sm90 import gemm

    right: Callable[..., Any] = gemm.load_stages
    monkeypatch.setattr(gemm, "load_stages", lambda *arguments: right(*arguments[:-1], True))
    mutant = compile_anew(GATE_UP.shape)
    assert len(re.findall(re.escape(WAIT), mutant.ptx)) == 2
    early = Compiled(mutant.function, mutant.ptx.replace(WAIT, "", 1))
    with pytest.raises(HazardError, match=TOO_EARLY):
        run_layer(MODES["immediate"], gate_up=early)


@pytest.mark.parametrize(
    "shape", [GATE_UP.shape, GATHERING.shape, DOWN.shape, KernelShape(8), KernelShape(256)], ids=str
)
def test_the_next_kernel_begins_after_the_last_load(shape: KernelShape) -> None:
    ptx = compile_shape(shape).ptx
    loads = [found.start() for found in re.finditer(r"cp\.async\.[\w.]*shared(::cta)?\.global", ptx)]
    assert loads and max(loads) < ptx.index(TRIGGER) == ptx.rindex(TRIGGER)


@pytest.mark.parametrize("token_tile", [8, 256])
def test_only_the_load_warp_lets_the_next_kernel_in(token_tile: int) -> None:
    """A CTA counts from its first warp that does; beside wide tiles three warps have nothing to do."""
    case = ProductCase(KernelShape(token_tile), tokens=8, features=16, k=192)
    call, _ = case.build()
    of_another_warp = f"""{{ .reg .b32 %warp; .reg .pred %other; mov.u32 %warp, %tid.x; shr.u32 %warp, %warp, 5;
        setp.ne.u32 %other, %warp, {CONSUMER_WARPS}; @%other trap; }}"""
    compiled = compile_shape(case.shape)
    run(call, compiled=compiled.patched(TRIGGER, f"{TRIGGER} {of_another_warp}"))
    with pytest.raises(HazardError, match="trap"):
        run(call, compiled=compiled.patched(TRIGGER, of_another_warp.replace("setp.ne", "setp.eq")))


PLAIN = ProductCase(KernelShape(8), tokens=8, features=16, k=192)
WORDS = 64
"""Words of the weights that a kernel writes, as they are."""


def run_after_a_write(options: Options, between: Compiled | None = None, programmatic: bool = True) -> Tensor:
    """A kernel that writes weights; maybe a GEMM of others; a GEMM of the former, as a dependent launch or not."""
    (first, _), (second, _) = PLAIN.build(), replace(PLAIN, seed=5).build()
    written = span(second.weights).view(torch.int32)[:WORDS]
    source = written.clone()
    reads = [first.weights, first.tokens, first.alpha, second.tokens, second.alpha]
    writes = [span(second.weights), first.out, second.out]
    with emulated(options, reads=[*(span(t) for t in reads), source], writes=writes) as emulator:
        stream, buffers = emulator.stream, [source.numpy(), written.numpy()]
        write = make_launch(ROUTE.format(words=WORDS), buffers, target="sm_90a", options=options, stream=stream)
        stream.submit(write, programmatic=False)
        if between is not None:
            emulator(between, first.arguments(1), 0)
        if not programmatic:
            stream.synchronize()
        emulator(compile_shape(second.shape), second.arguments(1), 0)
    return second.out


@pytest.mark.parametrize("mode", MODES)
def test_weights_may_be_written_by_the_launch_before_the_one_in_front(mode: str) -> None:
    """A GEMM reads weights before it waits. The one in front of it waits before it triggers, by the same warp."""
    gemm = compile_shape(PLAIN.shape)
    assert run_after_a_write(MODES[mode], programmatic=False).isfinite().all()
    assert run_after_a_write(MODES[mode], gemm).isfinite().all()
    with pytest.raises(HazardError, match=TOO_EARLY):
        run_after_a_write(MODES[mode])
    with pytest.raises(HazardError, match=TOO_EARLY):
        run_after_a_write(MODES[mode], gemm.patched(WAIT, f"{TRIGGER} {WAIT}", count=2))
