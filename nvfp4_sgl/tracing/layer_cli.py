"""``nvfp4-sgl layertest``: one layer of a checkpoint on a target beside the CPU reference, boundary by boundary."""

from __future__ import annotations

import argparse
import math
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from nvfp4_sgl.architectures import read_config
from nvfp4_sgl.arguments import (
    add_bound,
    add_checkpoint,
    add_json,
    add_mode,
    add_prompt,
    add_seed,
    add_target,
    check_passes,
    print_json,
    require_mode,
    target_here,
)
from nvfp4_sgl.checkpoint.verified import verify
from nvfp4_sgl.config import read_config_json
from nvfp4_sgl.errors import ConfigError
from nvfp4_sgl.ops.modes import ActivationMode
from nvfp4_sgl.targets.target import descriptor, modes
from nvfp4_sgl.terminal import Status
from nvfp4_sgl.tracing.bounds import default_bound

if TYPE_CHECKING:
    from nvfp4_sgl.tracing.layer import Stage


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``nvfp4-sgl layertest``."""
    add_checkpoint(parser)
    parser.add_argument("--layer", type=int, required=True, metavar="N", help="number of the layer, from 0")
    add_target(parser)
    add_mode(parser, "the target's")
    add_prompt(parser, 300)
    add_seed(parser, "activations and token ids")
    small, large = (default_bound([mode], of_a_run=False) for mode in (ActivationMode.W4A16, ActivationMode.W4A4))
    add_bound(parser, f"median error above which an op departs (default: {small:g}; with w4a4 {large:g})")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Compare and print; 1 if a stage has values that are no numbers, or is beyond the bound."""
    # All that can be refused is refused before torch is imported, which takes seconds, or a weight is read.
    check_layer(args.directory, args.layer)
    check_passes(args.prompt, args.steps)
    target = target_here(args.target)
    mode = modes(target)[0] if args.mode is None else require_mode(target, args.mode)
    verified = verify(args.directory)

    bound = default_bound([mode], of_a_run=False) if args.bound is None else args.bound
    with Status("layertest") as status:
        status.say("importing torch")
        import torch

        from nvfp4_sgl.tracing.layer import compare_layer

        device = torch.device("cuda", torch.cuda.current_device()) if descriptor(target).on_gpu else "cpu"
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
                say=status.say,
            )
        )
    departed = first_departure(stages, bound)
    if args.json:
        print_json(
            {
                "layer": args.layer,
                "target": target,
                "mode": mode.value,
                "bound": bound,
                "departs": departed and as_json(departed),
                "stages": [as_json(stage) for stage in stages],
            }
        )
    else:
        kind = verified.config.kind(args.layer).name
        print(f"layer {args.layer} ({kind}) on {target}, {mode.value}, beside the CPU reference in fp32")
        print(table(stages))
        print(verdict(departed, bound))
    sys.stdout.flush()
    return 1 if departed else 0


def as_json(stage: Stage) -> dict[str, object]:
    """A stage as an object that JSON can hold: what is not finite is ``None``."""
    values = asdict(stage)
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in values.items()
    }


def check_layer(directory: Path, layer: int) -> None:
    """Refuse a number that no layer of ``directory`` has; config.json alone is read."""
    config = read_config(read_config_json(directory), source=str(directory / "config.json"))
    layers = config.num_hidden_layers
    if not 0 <= layer < layers:
        raise ConfigError(f"--layer {layer}: {directory} has layers 0 to {layers - 1}; name one of them")


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
