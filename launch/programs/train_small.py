"""Train the small model and write it as BF16 and NVFP4 checkpoints: behind launch/train_small."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

STEPS = 400


def main() -> int:
    parser = argparse.ArgumentParser(prog="launch/train_small", description="Train a small DeepSeek-V4 on a CPU.")
    parser.add_argument(
        "--output", type=Path, required=True, metavar="OUT", help="directory for state, log and both checkpoints"
    )
    parser.add_argument("--steps", type=int, default=STEPS, help="the curriculum is stretched over them (%(default)s)")
    parser.add_argument("--until", type=int, help="stop after so many of them, and write what there is")
    parser.add_argument("--seed", type=int, default=0, help="of weights and documents (%(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="sums differ between numbers of threads (%(default)s)")
    args = parser.parse_args()
    # Behind the parser: it takes seconds, which --help need not wait for.
    import torch
    from small_model.export import write_checkpoint
    from small_model.training import Training, train

    from nvfp4_sgl.convert.options import Options
    from nvfp4_sgl.convert.run import convert

    torch.set_num_threads(args.threads)
    torch.use_deterministic_algorithms(True)
    args.output.mkdir(parents=True, exist_ok=True)
    state = args.output / "state.pt"
    try:
        run = Training.resume(state, args.seed, args.steps) if state.exists() else Training(args.seed, args.steps)
    except ValueError as error:
        parser.error(str(error))
    if run.done:
        print(f"{state}: {run.done} of {run.steps} steps are done already")
    started = time.monotonic()
    train(run, state, until=args.until)
    print(f"trained in {time.monotonic() - started:.0f} s")
    plain, full = args.output / "bf16", args.output / "nvfp4"
    if not plain.exists():
        write_checkpoint(run.model, plain)
    convert(plain, full, Options(), device=torch.device("cpu"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
