"""Train the small model and its drafts, and write checkpoints: behind launch/train_small."""

from __future__ import annotations

import argparse
import math
import sys
import time
from pathlib import Path

STEPS = 400
DRAFT_STEPS = {"cpu": 600, "cuda": 4000}


def main() -> int:
    parser = argparse.ArgumentParser(prog="launch/train_small", description="Train a small DeepSeek-V4 and its drafts.")
    parser.add_argument(
        "--output", type=Path, required=True, metavar="OUT", help="directory for states, drafts and checkpoints"
    )
    parser.add_argument("--steps", type=int, default=STEPS, help="the curriculum is stretched over them (%(default)s)")
    parser.add_argument("--until", type=int, help="stop after so many of them, and go on with what there is")
    parser.add_argument(
        "--drafts-of", type=Path, metavar="DIR", help="train drafts alone, behind this checkpoint of the small model"
    )
    parser.add_argument("--draft-steps", type=int, help="0: train no drafts (600 on a CPU, 4000 on a GPU)")
    parser.add_argument("--seconds", type=float, default=math.inf, help="let drafts be trained by then")
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), help="device that trains drafts (default: a GPU if there is one)"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and documents (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="sums differ between numbers of threads (%(default)s)")
    args = parser.parse_args()
    # Behind the parser: it takes seconds, which --help need not wait for.
    import torch

    torch.set_num_threads(args.threads)
    args.output.mkdir(parents=True, exist_ok=True)
    try:
        target = args.drafts_of or train_target(args)
        if args.draft_steps != 0:
            train_drafts(args, target)
    except ValueError as error:
        parser.error(str(error))
    return 0


def train_target(args: argparse.Namespace) -> Path:
    """Train the decoder; returns its checkpoint in full NVFP4."""
    import torch
    from small_model.export import write_checkpoint
    from small_model.training import Training, train

    from nvfp4_sgl.convert.options import Options
    from nvfp4_sgl.convert.run import convert

    torch.use_deterministic_algorithms(True)
    state = args.output / "state.pt"
    run = Training.resume(state, args.seed, args.steps) if state.exists() else Training(args.seed, args.steps)
    if run.done:
        print(f"{state}: {run.done} of {run.steps} steps are done already")
    started = time.monotonic()
    train(run, state, until=args.until)
    print(f"trained in {time.monotonic() - started:.0f} s")
    plain, full = args.output / "bf16", args.output / "nvfp4"
    if not plain.exists():
        write_checkpoint(run.model, plain)
    convert(plain, full, Options(), device=torch.device("cpu"))
    torch.use_deterministic_algorithms(False)
    return full


def train_drafts(args: argparse.Namespace, directory: Path) -> None:
    """Train both drafts behind a checkpoint, and write it with either."""
    import torch
    from small_model.draft_training import SIZES, DraftTraining, train
    from small_model.export import bundle
    from small_model.target import load_target

    from nvfp4_sgl.config import read_config_json

    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")
    steps = args.draft_steps or DRAFT_STEPS[device.type]
    raw = read_config_json(directory)
    run = DraftTraining(load_target(directory, device), raw, args.seed, steps, SIZES[device.type])
    run.seconds, state = args.seconds, args.output / "drafts.pt"
    if state.exists():
        run.resume(state)
        print(f"{state}: {run.done} of {run.steps} steps are done already")
    for kind, file in train(run, args.output).items():
        bundle(directory, file, kind, args.output / kind.value.lower())
        print(f"wrote {args.output / kind.value.lower()}")


if __name__ == "__main__":
    sys.exit(main())
