"""``nvfp4-sgl layertest``: one layer of a checkpoint on a target beside the CPU reference, boundary by boundary."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from nvfp4_sgl.checkpoint.verified import verify
from nvfp4_sgl.errors import ConfigError, UnsupportedError
from nvfp4_sgl.ops.modes import ActivationMode
from nvfp4_sgl.targets.choose import MODES, Target, detect_target

if TYPE_CHECKING:
    from nvfp4_sgl.tracing.layer import Stage

BOUNDS = {ActivationMode.W4A16: 0.03, ActivationMode.W4A4: 0.3}
"""Median error of a stage's rows that roundings explain: of bf16; of activations in FP4, whose codes flip."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``nvfp4-sgl layertest``."""
    parser.add_argument("dir", type=Path, metavar="DIR", help="checkpoint directory")
    parser.add_argument("--layer", type=int, required=True, metavar="N", help="number of the layer, from 0")
    parser.add_argument("--target", choices=[target.value for target in Target], help="default: this machine's")
    parser.add_argument("--mode", choices=[mode.value for mode in ActivationMode], help="default: the target's")
    parser.add_argument("--prompt", type=int, default=300, metavar="TOKENS", help="of the first pass (default: 300)")
    parser.add_argument("--steps", type=int, default=2, metavar="N", help="decode steps after it (default: 2)")
    parser.add_argument("--seed", type=int, default=0, help="of activations and token ids")
    parser.add_argument("--bound", type=float, help="median error that is too large (default: 0.03; with w4a4 0.3)")
    parser.add_argument("--json", action="store_true", help="the same for programs")


def run(args: argparse.Namespace) -> int:
    """Compare and print; 1 if a stage has values that are no numbers, or is beyond the bound."""
    import torch

    from nvfp4_sgl.tracing.layer import compare_layer

    target = Target(args.target) if args.target else detect_target()
    if target is not Target.CPU and target is not detect_target():
        raise UnsupportedError(
            f"--target {target.value}: expected a GPU of that kind here, found {detect_target().value};"
            " run this on such a machine, or leave --target out"
        )
    mode = ActivationMode(args.mode) if args.mode else MODES[target][0]
    if mode not in MODES[target]:
        known = ", ".join(each.value for each in MODES[target])
        raise ConfigError(f"--mode {mode.value}: {target.value} runs {known}")
    verified = verify(args.dir)
    layers = verified.config.num_hidden_layers
    if not 0 <= args.layer < layers:
        raise ConfigError(f"--layer {args.layer}: {args.dir} has layers 0 to {layers - 1}")
    if args.prompt < 1 or args.steps < 0:
        raise ConfigError(f"--prompt {args.prompt} --steps {args.steps}: expected at least 1 token, and no less than 0")
    bound = BOUNDS[mode] if args.bound is None else args.bound
    device = "cpu" if target is Target.CPU else torch.device("cuda", torch.cuda.current_device())
    stages = list(
        compare_layer(
            verified,
            args.layer,
            target,
            device=device,
            mode=mode,
            prompt=args.prompt,
            steps=args.steps,
            seed=args.seed,
        )
    )
    departed = first_departure(stages, bound)
    if args.json:
        print(json.dumps({"stages": [asdict(stage) for stage in stages], "departs": departed and asdict(departed)}))
    else:
        kind = verified.config.kind(args.layer).name
        print(f"layer {args.layer} ({kind}) on {target.value}, {mode.value}, beside the CPU reference in fp32")
        print(table(stages))
        print(verdict(departed, bound))
    sys.stdout.flush()
    return 1 if departed else 0


def first_departure(stages: list[Stage], bound: float) -> Stage | None:
    """The first stage with a value that is no number, or a median error beyond ``bound``."""
    return next((stage for stage in stages if stage.bad or stage.median > bound), None)


def table(stages: list[Stage]) -> str:
    """One line a stage, in the order in which they ran."""
    lines = ["pass  boundary                               median   worst     amax  of reference  not finite"]
    for stage in stages:
        _, _, name = stage.name.split(".", 2)
        figures = f"{stage.median:>9.5f} {stage.worst:>7.4f} {stage.amax:>8.3g} {stage.reference_amax:>13.3g}"
        lines.append(f"{stage.number:>4}  {name:<36}{figures} {stage.bad:>11}")
    return "\n".join(lines)


def verdict(departed: Stage | None, bound: float) -> str:
    if departed is None:
        return f"no boundary departs: median errors of rows are at most {bound:g}"
    why = f"{departed.bad} values are no numbers" if departed.bad else f"median error {departed.median:.3f} > {bound:g}"
    return f"the first that departs: {departed.name} in pass {departed.number}: {why}"
