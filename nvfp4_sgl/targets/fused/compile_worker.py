"""A process that compiles kernels: ``python -m nvfp4_sgl.targets.fused.compile_worker JOB``."""

from __future__ import annotations

import ctypes
import pickle
import sys
from pathlib import Path

from nvfp4_sgl.cutedsl_kernels.library import find_runtime
from nvfp4_sgl.targets.fused.compile_ahead import Job, work
from nvfp4_sgl.triton_kernels import ahead

PROCESSORS = 1
"""Nothing that is compiled here depends on the number of multiprocessors: it has been specialised already."""

if __name__ == "__main__":
    # Without a device CuTeDSL does not load its runtime, whose functions an object file must resolve.
    ctypes.CDLL(str(find_runtime()), mode=ctypes.RTLD_GLOBAL)
    job: Job = pickle.loads(Path(sys.argv[1]).read_bytes())
    with ahead.targeting(job.capability, PROCESSORS):
        work(job)
