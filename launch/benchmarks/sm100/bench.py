"""Report on the SM100 kernels for DeepSeek-V4's shapes, behind launch/bench_sm100.

Anywhere: kernels are compiled for sm_100a (registers, shared memory), run in the emulator of tests/sm100 (instructions
of a stage of the main loop) and modelled (waves, bytes, times). On a B200 also numerics against fp64 and times, with
operands out of cache, beside cuBLAS and flashinfer.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.sm100.cases import CHECKPOINTS, FULL, MODELS, Case, cases
from benchmarks.sm100.facts import KernelFacts, kernel_facts, shape_of
from benchmarks.sm100.measure import CudaTimer, Measured, measure
from benchmarks.sm100.overlap import CALIBRATION, calibrated, overlap_row
from benchmarks.sm100.steps import (
    PREFILL_TOKENS,
    WHOLE_WAVES,
    passes,
    persistent_gain,
    prefill_excess,
    record,
    recorded,
    step_row,
    steps,
)
from benchmarks.sm100.waves import wave_row
from nvfp4_sgl.cutedsl_kernels.compiled import KernelKey
from nvfp4_sgl.cutedsl_kernels.sm100.cost import cost
from nvfp4_sgl.cutedsl_kernels.sm100.shape import KernelShape

QUICK = {"models": ["flash"], "tp": [8], "tokens": [1]}
UNMEASURED = (
    "No SM100 GPU here: nothing below was measured, and nothing ever was by this project. Compiled: registers, shared"
    " memory. Emulated: instructions. All times are modelled."
)

LEGEND = """\
kernel: token tile, CTA pairs of a cluster (along features x along tokens), whether pairs share the tiles that fill no
wave (stream-K), CTAs that split K, output. in flight: TMA stages of a ring on their way. MMA/stage, cp: tcgen05.mma and
tcgen05.cp of 256 of K; MMA warp, TMA warp: other PTX instructions that these warps spend on it. busy: the tensor core
in a main loop of K = 2048 (narrow tiles: operands from HBM). handover: cycles between two tiles in the tensor core.
drain: cycles of a tile's epilogue. ahead: experts' counts are read, and first weights sent for, before the wait for the
kernel in front, which no time here credits. tail: SM time without a tile. HBM/least, TMA/least: bytes over those of
codes, block scales and outputs, each once. floor: at 7.2 TB/s or 9 PFLOP/s, whichever takes longer. modelled us:
cutedsl_kernels/sm100/cost.py, launches overlap. alone us: between idle launches."""


GOALS = f"""\
baseline: launch/results/sm100_baseline.json, the same model's times of the design before experts' K was split,
launches overlapped and the shared expert was merged. Prefill of {PREFILL_TOKENS}: a product should take its floor /
0.8 or, if the floor is below 25 us, its floor + 6 us; "goal" in the tables below says by how much it misses. What
misses has few waves of tiles. Stream-K shares the tiles of a last wave that at most half of the pairs would have work
in; to hand over their sums takes L2's time beside the operands. {WHOLE_WAVES} = 37 x 256 tokens fill whole waves of 74
pairs of SMs: there no product of Flash or Pro on 1 or 8 ranks misses by more than 0.2 us."""
WAVES = """\
What misses, in waves of tiles of 256 by 256 on 74 pairs of SMs, and by how much it would miss with a last wave done
otherwise (us; negative: met; empty: no pair would be idle enough). None of these is built: the first is a bound, of the
others none meets the goal for more than one product. even: all pairs end together, free of cost. half tiles: the last
wave's tiles cut in two along the tokens, each limited by L2. K split: pairs share the K of a tile of the last wave and
add up their sums through L2. 224 tokens: all tiles 256 by 224, so that 8192 tokens are 37 tiles and waves are whole;
tiles then begin within an atom of block scales, of which each reads three."""
LIBRARY = """\
Without the compressors' matrices, which are bf16 there: a library multiplies them. Quantising activations to MXFP8 is a
launch a product that is not counted either."""
PERSISTENT = """\
One persistent kernel for gate/up and down is not built; its gain in a decode step of one token, by this model:"""
OVERLAP = f"""\
Before they wait for the kernel in front, GEMMs set up and send for their first weights; experts' GEMMs read counts,
too. The times above do not credit it. Sums of a decode step of one token: without credit; two bounds, if counts or all
of it took no time; and with credits by constants that an H200 gave (launch/results/{CALIBRATION.name}):"""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="launch/bench_sm100", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS), help="flash, pro")
    parser.add_argument("--tp", type=int, nargs="+", default=[1, 8], metavar="N", help="tensor-parallel sizes")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 64, 8192], help="tokens of a pass")
    parser.add_argument(
        "--checkpoint",
        choices=CHECKPOINTS,
        default=FULL,
        help="all matrices in NVFP4, or FP8 where DeepSeek's and NVIDIA's releases have it (default: full)",
    )
    parser.add_argument("--quick", action="store_true", help="one token of Flash on 8 ranks; implies --no-facts")
    parser.add_argument("--no-facts", action="store_true", help="kernels are neither compiled here nor emulated")
    parser.add_argument("--modelled", action="store_true", help="the cost model alone: seconds, and no kernel is made")
    parser.add_argument("--record", type=Path, help="also write each pass's sum here, to compare later designs with")
    parser.add_argument("--output", type=Path, metavar="FILE", help="also write everything here, as JSON")
    args = parser.parse_args(arguments)
    if args.quick:
        vars(args).update(QUICK)
    chosen = cases(args.models, args.tp, args.tokens, args.checkpoint)
    device = None if args.modelled else b200()
    print(f"SM100 kernels on {torch.cuda.get_device_name(device)}" if device else UNMEASURED)
    print(f"{time.strftime('%Y-%m-%d')}, torch {torch.__version__}\n")
    without_facts = args.quick or args.modelled or args.no_facts
    facts = {} if without_facts else describe(list(dict.fromkeys(case.key for case in chosen)))
    rows = [row(case, measure(case, device, CudaTimer()) if device else None) for case in chosen]
    print(LEGEND + "\n")
    if facts:
        print(table([kernel_row(key, found) for key, found in facts.items()]) + "\n")
    sums = steps(chosen)
    print("## All products of all layers, modelled\n")
    baseline = recorded() if args.checkpoint == FULL else {}
    if args.checkpoint != FULL:
        print(LIBRARY + "\n")
    print(table([step_row(step, baseline.get(step.name)) for step in sums]) + "\n")
    print(GOALS + "\n")
    missed = [(case, prefill_excess(case)) for case in chosen if case.tokens == PREFILL_TOKENS]
    waves = [wave_row(short(case.product.name), case, excess) for case, excess in missed if excess > 0]
    if waves:
        print(WAVES + "\n\n" + table(waves) + "\n")
    print(PERSISTENT + "\n")
    for name, found in passes(chosen).items():
        if name[2] == 1:
            print(f"* {name[0]}, TP {name[1]}: {persistent_gain(found):.1%}")
    print("\n" + OVERLAP + "\n")
    print(table([overlap_row(found, calibrated(1)) for name, found in passes(chosen).items() if name[2] == 1]))
    print()
    if args.record:
        record(sums, args.record)
    for model in args.models:
        for ranks in args.tp:
            print(f"## {model}, TP {ranks}\n")
            here = [one for one in rows if (one["model"], one["ranks"]) == (model, ranks)]
            print(table([{key: value for key, value in one.items() if key not in ("model", "ranks")} for one in here]))
            print()
    if args.output:
        kernels = [{"kernel": label(shape_of(key)), **asdict(found)} for key, found in facts.items()]
        args.output.write_text(
            json.dumps(
                {"checkpoint": args.checkpoint, "measured": device is not None, "kernels": kernels, "cases": rows},
                indent=1,
            )
        )
    wrong = [one for one in rows if one.get("error", 0.0) > 1.0]
    for one in wrong:
        print(f"WRONG: {one['model']}, TP {one['ranks']}, {one['product']}, {one['tokens']} tokens", file=sys.stderr)
    return 1 if wrong else 0


def b200() -> torch.device | None:
    """The first GPU, if the kernels run on it."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability(0)[0] != 10:
        return None
    return torch.device("cuda", 0)


def describe(keys: Iterable[KernelKey]) -> dict[KernelKey, KernelFacts]:
    """Facts of each kernel; seconds to a minute each, so progress goes to stderr."""
    found = {}
    for key in keys:
        print(f"compiling and emulating: {label(shape_of(key))}", file=sys.stderr, flush=True)
        found[key] = kernel_facts(key)
    return found


def label(shape: KernelShape) -> str:
    """A kernel's shape in a few words."""
    words = [str(shape.token_tile)]
    if shape.pair:
        words.append(f"pair {shape.shared_tokens}x{shape.shared_weights}")
    if shape.stream_k:
        words.append("stream-K")
    if shape.split_k > 1:
        words.append(f"split {shape.split_k}")
    kinds = ("gated", shape.gated), ("grouped", shape.grouped), ("ahead", shape.counts_ahead)
    words += [name for name, holds in kinds if holds]
    words += [shape.operands] if shape.operands != "nvfp4" else []
    return " ".join([*words, shape.output])


def kernel_row(key: KernelKey, facts: KernelFacts) -> dict[str, Any]:
    shape = shape_of(key)
    return {
        "kernel": label(shape),
        "stages": shape.stages,
        "in flight": round(facts.in_flight, 1),
        "TMEM": shape.tensor_columns,
        "regs": facts.registers,
        "spill": facts.spilled,
        "smem KiB": round(facts.shared_bytes / 1024),
        "MMA/stage": facts.mmas,
        "cp": facts.copies,
        "MMA warp": round(facts.mma_warp),
        "TMA warp": round(facts.load_warp),
        "busy": f"{facts.busy:.0%}",
        "handover": round(facts.handover),
        "drain": round(facts.drain),
    }


def row(case: Case, measured: Measured | None) -> dict[str, Any]:
    """A case's line; what starts with "model" is modelled."""
    found, floor = cost(case.shape, case.problem), case.problem.floor_seconds() * 1e6
    line: dict[str, Any] = {
        "model": case.model,
        "ranks": case.ranks,
        "product": short(case.product.name),
        "features": case.product.features,
        "k": case.product.k,
        "groups": case.product.groups,
        "layers": case.layers,
        "tokens": case.tokens,
        "kernel": label(case.shape),
        "waves": round(found.waves, 1),
        "tail": f"{found.tail_waste:.0%}",
        "HBM/least": round(found.memory_bytes / case.problem.least_bytes, 2),
        "TMA/least": round(found.loaded_bytes / case.problem.least_bytes, 1),
        "floor us": round(floor, 2),
        "modelled us": round(found.seconds * 1e6, 2),
        "alone us": round(found.alone_seconds * 1e6, 2),
        "modelled/floor": round(found.seconds * 1e6 / floor, 2),
    }
    if case.tokens == PREFILL_TOKENS:
        excess = prefill_excess(case) * 1e6
        line["goal"] = "met" if excess <= 0 else f"MISSED by {excess:.1f} us"
    if measured is not None:
        line |= {"us": round(measured.seconds * 1e6, 2), "us/floor": round(measured.seconds * 1e6 / floor, 2)}
        line |= {f"{name} us": round(seconds * 1e6, 2) for name, seconds in measured.others.items()}
        line["error"] = round(measured.error, 3)
    return line


def short(name: str) -> str:
    """The name of the first of several merged matrices, and how many follow."""
    first, *others = name.split(" + ")
    return f"{first} + {len(others)}" if len(others) > 1 else name


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown, in columns."""
    names = list(dict.fromkeys(name for one in rows for name in one))
    cells = [[str(one.get(name, "")) for name in names] for one in rows]
    widths = [max(len(line[i]) for line in [names, *cells]) for i in range(len(names))]
    lines = [names, ["-" * width for width in widths], *cells]
    return "\n".join(
        "| " + " | ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)) + " |" for line in lines
    )


if __name__ == "__main__":
    sys.exit(main())
