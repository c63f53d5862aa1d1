"""Load one tensor-parallel rank's share of a checkpoint into Hopper's layout, on the CPU, and say how large it is."""

from __future__ import annotations

import sys

from nvfp4_sgl.standalone import Standalone
from nvfp4_sgl.targets.choose import Target
from nvfp4_sgl.weights.parallel import TensorParallel


def main() -> None:
    """``python -m benchmarks.load_rank DIR RANKS``: rank 0 of RANKS."""
    parallel = TensorParallel(0, int(sys.argv[2]))
    target = Target.SM90  # the reference would hold fp32 copies, eight times as large
    model = Standalone(sys.argv[1], target=target, requests=1, capacity=256, parallel=parallel)
    held = [*model.decoder.parameters(), *model.decoder.buffers(), model.table, model.head]
    sizes = {tensor.data_ptr(): tensor.nbytes for tensor in held}
    print(f"{sum(sizes.values()) / 1e9:.2f} GB of weights")


if __name__ == "__main__":
    main()
