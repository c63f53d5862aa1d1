"""Load one tensor-parallel rank's share of a checkpoint into Hopper's layout and say, in JSON, how large it is and what
it took: seconds, and what the process had allocated of the host's memory before."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch

from benchmarks.process_memory import status
from nvfp4_sgl.standalone import Standalone
from nvfp4_sgl.targets.choose import Target
from nvfp4_sgl.weights.parallel import TensorParallel


def main() -> None:
    """``python -m benchmarks.load_rank DIR RANKS``: rank 0 of RANKS, on the CPU."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("ranks", type=int)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    arguments = parser.parse_args()
    parallel = TensorParallel(arguments.rank, arguments.ranks)
    if arguments.device != "cpu":
        torch.zeros(1, device=arguments.device)  # the driver's memory is not the loader's
    before, started = status("self").get("RssAnon", 0), time.monotonic()
    model = Standalone(
        arguments.directory,
        target=Target.SM90,  # the reference would hold fp32 copies, eight times as large
        device=arguments.device,
        requests=1,
        capacity=256,
        parallel=parallel,
    )
    if arguments.device != "cpu":
        torch.cuda.synchronize()
    seconds = time.monotonic() - started
    held = [*model.decoder.parameters(), *model.decoder.buffers(), model.table, model.head]
    weights = sum({tensor.data_ptr(): tensor.nbytes for tensor in held}.values())
    print(json.dumps({"weights": weights, "seconds": round(seconds, 2), "allocated before": before}))


if __name__ == "__main__":
    main()
