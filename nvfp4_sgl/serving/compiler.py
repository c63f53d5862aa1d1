"""Compiles a server's kernels while its weights are loaded: neither needs the other."""

from __future__ import annotations

import logging
import os
import pickle
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from nvfp4_sgl.build import Gpu, Serving, build
from nvfp4_sgl.checkpoint.verified import Verified
from nvfp4_sgl.cutedsl_kernels import launcher
from nvfp4_sgl.targets.fused.compile_ahead import LIBRARY_VARIABLE, adopt_given, given_folder
from nvfp4_sgl.targets.fused.parent import end_with
from nvfp4_sgl.triton_kernels.common import chip

logger = logging.getLogger(__name__)

NICENESS = 10
"""Loading comes first."""


def start_compiling(verified: Verified, target: str, setting: Serving) -> subprocess.Popen[bytes] | None:
    """Start to compile what this server's warm-up needs, in a process of its own; ``None`` without a GPU.

    The warm-up waits for it, and compiles itself what is missing then. A failure is in the log and stops nothing.
    Kernels in the folder that ``NVFP4_SGL_KERNELS`` names are not compiled.

    Raises:
        LibraryError: that folder cannot be used; said before the weights are loaded.
    """
    given = given_folder()
    if not isinstance(launcher.current(), launcher.CudaLauncher) or not torch.cuda.is_available():
        if given is not None:
            logger.warning("%s=%s: without effect: this server runs on no GPU", LIBRARY_VARIABLE, given)
        return None
    if given is not None:
        # Before the process starts, which then finds its Triton kernels in Triton's cache.
        adopt_given(given)
    device = torch.device("cuda", torch.cuda.current_device())
    major, minor = torch.cuda.get_device_capability(device)
    gpu = Gpu(10 * major + minor, chip.processors(device), launcher.current().clusters(device))
    return run_apart(verified, target, setting, gpu)


def run_apart(verified: Verified, target: str, setting: Serving, gpu: Gpu) -> subprocess.Popen[bytes]:
    """:func:`nvfp4_sgl.build.build` in another process, which ends with the thread that calls this."""
    with tempfile.NamedTemporaryFile(prefix="nvfp4-sgl-build-", delete=False) as file:
        pickle.dump((verified, target, setting, gpu), file)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "nvfp4_sgl.serving.compiler", file.name, str(os.getpid())]
    return subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL)


def main(path: Path, parent: int) -> None:
    """Compile what the file describes, and remove it. Ends with process ``parent``, the server."""
    verified, target, setting, gpu = pickle.loads(path.read_bytes())
    path.unlink()
    # An exception, so that what is half done is removed; the processes below end with this one.
    signal.signal(signal.SIGTERM, lambda *given: sys.exit(f"{target}: no more kernels: the server has ended"))
    end_with(parent, signal.SIGTERM)
    os.nice(NICENESS)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s kernels: %(message)s")
    build(verified, target, [setting], gpu=gpu, given=given_folder())


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
