"""Load one tensor-parallel rank's share of a checkpoint on the CPU, as a server does, and say how large it is."""

from __future__ import annotations

import sys

import torch

from nvfp4_sgl.standalone import Standalone
from nvfp4_sgl.weights.parallel import TensorParallel


def main() -> None:
    """``python -m benchmarks.load_rank DIR RANKS``: rank 0 of RANKS."""
    parallel = TensorParallel(0, int(sys.argv[2]))
    model = Standalone(sys.argv[1], dtype=torch.bfloat16, requests=1, capacity=256, parallel=parallel)
    held = [*model.decoder.parameters(), *model.decoder.buffers(), model.table, model.head]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in held}
    print(f"{sum(storages.values()) / 1e9:.2f} GB of weights")


if __name__ == "__main__":
    main()
