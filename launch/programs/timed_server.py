"""``sglang.launch_server`` whose scheduler also times the graphs of its decode steps, behind launch/profile_host.

``python launch/programs/timed_server.py FOLDER ARGUMENT...``. Once so many steps of a graph have run, each rank replays
it back to back and writes the microseconds of a replay, by CUDA's events, to ``FOLDER/GRAPH/BATCH-RANK``. All ranks of
a server run the same steps, so that the collectives inside meet. Scheduler processes import this file, as
``multiprocessing`` has it.

A server that drafts has up to three kinds of graphs in a round. Each is timed right behind its own replay, before
anything else has changed what it reads:

================  =========================================================================
GRAPH             what it holds
================  =========================================================================
``target``        the decode step; of a round the verify pass
``draft``         EAGLE's guesses behind the first, or DSpark's block with all its guesses
``draft-extend``  EAGLE's pass over the rows that were verified, which makes the first guess
================  =========================================================================

A further replay reads the same inputs and writes the same values to the same places:

* Slots and positions lie in the runner's buffers. EAGLE's further guesses count the positions up, and the graph's last
  node counts them down again.
* Rows of the window and compressed entries have a slot each, which the replay writes again.
* A compressor's ring is indexed by position, not advanced. A window of 4 that closes at position L reads from L - 7 on,
  and a round of n rows writes over what lies 16 positions before them, up to L + n - 17. So a round may have 9 rows.
  One of 10 would spoil its own next replay, which DSpark's longest blocks have; rounds here have 4 or 6.
* Drafts have no compressor.
* What is accepted is decided behind the verify pass's graph, and no graph draws a random number.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

FOLDER = "NVFP4_SGL_REPLAY_TIMES"
"""The variable that tells scheduler processes where to write."""
STEPS_BEFORE, REPLAYS = 32, 64
"""Steps of a graph before it is timed, and replays in a row."""
_steps: Counter[tuple[str, int]] = Counter()


def execute(original: Callable[..., Any], runner: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
    """Hook around a decode step, a verify pass, or a block of DSpark's draft."""
    output = original(runner, forward_batch, *args, **kwargs)
    graph = "draft" if runner.model_runner.is_draft_worker else "target"
    time_once(graph, runner, lambda: runner.backend.replay(runner._replay_graph_key, forward_batch))
    return output


def replay_draft(original: Callable[..., Any], runner: Any, shape_key: Any, forward_batch: Any) -> Any:
    """Hook around the replay of EAGLE's further guesses."""
    output = original(runner, shape_key, forward_batch)
    time_once("draft", runner, lambda: original(runner, shape_key, forward_batch))
    return output


def replay_extend(original: Callable[..., Any], runner: Any, shape_key: Any, forward_batch: Any) -> Any:
    """Hook around the replay of EAGLE's pass behind a verify pass."""
    output = original(runner, shape_key, forward_batch)
    time_once("draft-extend", runner, lambda: original(runner, shape_key, forward_batch))
    return output


HOOKS = {
    "sglang.srt.model_executor.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner.execute": execute,
    "sglang.srt.speculative.eagle_draft_cuda_graph_runner.EAGLEDraftCudaGraphRunner._replay_graph": replay_draft,
    "sglang.srt.speculative.eagle_draft_extend_cuda_graph_runner.EAGLEDraftExtendCudaGraphRunner._replay_graph": (
        replay_extend
    ),
}
"""Functions of SGLang, and what stands around them."""


def time_once(graph: str, runner: Any, replay: Callable[[], object]) -> None:
    """Count a step of the runner's graph of its batch, and time it behind the step that says so."""
    batch = int(runner.bs)
    _steps[graph, batch] += 1
    if _steps[graph, batch] == STEPS_BEFORE:
        from nvfp4_sgl.serving.sglang.parallel import tp_rank

        us = replay_us(replay)
        file = Path(os.environ[FOLDER]) / graph / f"{batch}-{tp_rank()}"
        file.parent.mkdir(exist_ok=True)
        file.with_suffix(".part").write_text(f"{us}\n")
        file.with_suffix(".part").rename(file)


def replay_us(replay: Callable[[], object]) -> float:
    """Microseconds of a replay. The host enqueues replays while the GPU runs those before."""
    import torch

    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    replay()  # the GPU is busy when the first event is recorded
    begin.record()
    for _ in range(REPLAYS):
        replay()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1000 / REPLAYS


def install() -> None:
    """Register the hooks, which SGLang applies in each process when it has loaded its plugins."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for path, hook in HOOKS.items():
        HookRegistry.register(path, hook, HookType.AROUND)


if __name__ == "__main__":
    os.environ[FOLDER] = sys.argv.pop(1)
if os.environ.get(FOLDER):
    install()
if __name__ == "__main__":
    import runpy

    # This file stays __main__, which is what processes import that are spawned.
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=False)
