"""``sglang.launch_server`` whose scheduler also times the graphs of its decode steps, behind launch/profile_host.

``python launch/programs/timed_server.py FOLDER ARGUMENT...``. Once so many steps of a graph have run, each rank replays
it back to back and writes the microseconds of a replay, by CUDA's events, to ``FOLDER/BATCH-RANK``. All ranks of a
server run the same steps, so that the collectives inside meet. Scheduler processes import this file, as
``multiprocessing`` has it.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

HOOKED = "sglang.srt.model_executor.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner.execute"
FOLDER = "NVFP4_SGL_REPLAY_TIMES"
"""The variable that tells scheduler processes where to write."""
STEPS_BEFORE, REPLAYS = 32, 64
"""Steps of a graph before it is timed, and replays in a row."""
_steps: Counter[int] = Counter()


def execute(original: Callable[..., Any], runner: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
    """Hook around a decode step of SGLang's: its graph is timed once, behind the step."""
    output = original(runner, forward_batch, *args, **kwargs)
    batch = int(runner.bs)
    if not runner.model_runner.is_draft_worker:
        _steps[batch] += 1
        if _steps[batch] == STEPS_BEFORE:
            us = replay_us(runner, forward_batch)
            file = Path(os.environ[FOLDER]) / f"{batch}-{runner.model_runner.tp_rank}"
            file.with_suffix(".part").write_text(f"{us}\n")
            file.with_suffix(".part").rename(file)
    return output


def replay_us(runner: Any, forward_batch: Any) -> float:
    """Microseconds of a replay of the step's graph. The host enqueues replays while the GPU runs those before.

    A replay computes the same step again, from the same inputs into the same rows.
    """
    import torch

    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    runner.backend.replay(runner._replay_graph_key, forward_batch)  # the GPU is busy when the first event is recorded
    begin.record()
    for _ in range(REPLAYS):
        runner.backend.replay(runner._replay_graph_key, forward_batch)
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1000 / REPLAYS


def install() -> None:
    """Register the hook, which SGLang applies in each process when it has loaded its plugins."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(HOOKED, execute, HookType.AROUND)


if __name__ == "__main__":
    os.environ[FOLDER] = sys.argv.pop(1)
if os.environ.get(FOLDER):
    install()
if __name__ == "__main__":
    import runpy

    # This file stays __main__, which is what processes import that are spawned.
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=False)
