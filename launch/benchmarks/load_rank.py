"""Load one tensor-parallel rank's share of a checkpoint into Hopper's layout, and print its size and cost as JSON.

The cost is the seconds, how many of them files were waited for, and the host's memory: what was allocated before, and
what of it is pinned.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch

from benchmarks.process_memory import status
from nvfp4_sgl.checkpoint.reader import CheckpointReader
from nvfp4_sgl.checkpoint.staged_files import STAGING_BYTES
from nvfp4_sgl.standalone import Standalone
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
        target="sm_90a",  # the reference would hold fp32 copies, eight times as large
        device=arguments.device,
        requests=1,
        capacity=256,
        parallel=parallel,
    )
    if arguments.device != "cpu":
        torch.cuda.synchronize()
    seconds = time.monotonic() - started
    reader = model.decoder.context.source
    assert isinstance(reader, CheckpointReader)
    is_gpu = torch.device(arguments.device).type == "cuda"
    found = {
        "device": torch.cuda.get_device_name() if is_gpu else "CPU",
        "bytes": reader.nbytes,
        "seconds": round(seconds, 2),
        "waited for files": round(reader.waited, 2),
        "allocated before": before,
        "pinned": STAGING_BYTES if is_gpu else 0,
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
