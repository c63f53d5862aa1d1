"""Processes that compile kernels: ``python -m nvfp4_sgl.targets.fused.compile_worker JOB PROCESSES PARENT``.

The modules are imported once and the processes forked from that: importing torch and two compilers takes longer than
most of them need to compile.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import sys
import traceback
from pathlib import Path

from nvfp4_sgl.cutedsl_kernels.library import find_runtime
from nvfp4_sgl.targets.fused.compile_ahead import Job, work
from nvfp4_sgl.targets.fused.parent import end_with
from nvfp4_sgl.triton_kernels import ahead

PROCESSORS = 1
"""Nothing that is compiled here depends on the number of multiprocessors: it has been specialised already."""


def main(path: str, processes: int, parent: int) -> int:
    """Compile the job in ``path``; 1 if a process failed, with its traceback printed. Ends with process ``parent``."""
    end_with(parent)
    job: Job = pickle.loads(Path(path).read_bytes())
    # Without a device CuTeDSL does not load its runtime, whose functions an object file must resolve.
    ctypes.CDLL(str(find_runtime()), mode=ctypes.RTLD_GLOBAL)
    import cutlass.cute  # noqa: F401  imported before the fork, not by each process

    children = [_fork(job) for _ in range(processes)]
    return int(any(os.waitpid(child, 0)[1] for child in children))


def _fork(job: Job) -> int:
    """Start a process that takes tasks until none is left; its number."""
    parent = os.getpid()
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        end_with(parent)
        with ahead.targeting(job.capability, PROCESSORS):
            work(job)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
