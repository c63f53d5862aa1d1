"""Servers on this GPU with checkpoints other than full NVFP4 and, on Hopper, with SM100's mode.

Judged as in ``test_server``: log-probabilities against the CPU reference of the same checkpoint in the same mode.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from nvfp4_sgl.ops.modes import ActivationMode
from nvfp4_sgl.synthetic.tiny import write_tiny
from tests.support import bf16_logprobs, native
from tests.support.bf16_logprobs import errors, generate, prompt
from tests.support.calm import write_calm
from tests.support.gpu_server import FLAGS, SHAPES, require_as_good
from tests.support.server import ServerPool

pytestmark = [pytest.mark.gpu, pytest.mark.server, pytest.mark.timeout(900)]

LENGTHS = (1, 127, 129, 1100)
FORMATS = ("deepseek", "nvfp4-experts")
"""Experts in MXFP4 or NVFP4, the other matrices in FP8, compressors in bf16."""
CASES = [
    (run, storage)
    for run in native.runs()
    for storage in ("nvfp4-full", *FORMATS)
    if (run.mode, storage) != (native.MODES[run.target], "nvfp4-full")
]
"""All but full NVFP4 in a target's own mode, which ``test_server`` has."""


@pytest.fixture(scope="module")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerPool]:
    pool = ServerPool(tmp_path_factory.mktemp("servers"))
    yield pool
    pool.close()


@pytest.mark.parametrize(("run", "storage"), CASES, ids=lambda value: str(value))
def test_log_probabilities(run: native.Run, storage: str, serve: ServerPool, tmp_path: Path) -> None:
    """Whole and chunked prompts, one by one, then all at once."""
    write = write_calm if run.mode is ActivationMode.W4A4 else write_tiny
    write(tmp_path, format=storage, seed=3, **SHAPES)
    asked = ("--json-model-override-args", f'{{"activation_mode": "{run.mode.value}"}}')
    server = serve(tmp_path, *FLAGS, *(asked if run.mode is not native.MODES[run.target] else ()))
    assert server.info()["activation_mode"] == run.mode.value
    cold, crowd = ([prompt(n, seed=seed) for n in LENGTHS] for seed in (0, 2))
    alone = [generate(server, ids, logprob_start_len=0) for ids in cold]
    with ThreadPoolExecutor(len(LENGTHS)) as threads:
        together = list(threads.map(lambda ids: generate(server, ids), crowd))
    with bf16_logprobs.references(tmp_path, capacity=1280, mode=run.mode) as references:
        require_as_good(run.mode, *errors(alone, cold, references))
        require_as_good(run.mode, *errors(together, crowd, references))
