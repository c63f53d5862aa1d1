"""Prompt passes of a server in CUDA graphs: whether there are some, which, and which passes they take.

SGLang has graphs of prompts of its own, which leave DeepSeek-V4 out. These are captured when the scheduler is built,
and stand for the body of the model; logits are computed behind them, of the tokens that need some. What runs where:

=====================================================================  ================================================
pass                                                                   runs
=====================================================================  ================================================
tokens of prompts, as many as a graph holds                            in the least graph that holds it
what DSpark's stages keep of these tokens                              in the same graph
the MTP block's pass over these tokens                                 eagerly, by the streams that the graph has left
more tokens, or more requests than a graph has                         eagerly, launch by launch
decode, verify                                                         in SGLang's graphs
a server without graphs, with ``NVFP4_SGL_TRACE``, on a CPU, or with   every prompt eagerly: nothing is captured here
``--disable-prefill-cuda-graph``
=====================================================================  ================================================

The MTP block's pass needs the token that is sampled behind the target's, so it cannot be in that graph. It is one
block, and waits for nothing: Python launches it while the GPU still runs the target's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nvfp4_sgl.errors import UnsupportedError
from nvfp4_sgl.model.static_prompt import shapes, unscored_length
from nvfp4_sgl.prompt_graphs import PromptGraphs
from nvfp4_sgl.prompt_sizes import REQUESTS, SWITCH
from nvfp4_sgl.serving import stages
from nvfp4_sgl.serving.prompt_switch import captured_tokens
from nvfp4_sgl.serving.sglang import parallel


def capture(runner: Any) -> None:
    """Capture the prompts of SGLang's ``ModelRunner``, whose backend then takes them; all ranks call this at once.

    Raises:
        UnsupportedError: they do not fit in the memory that is left.
    """
    tokens = captured_tokens()
    if not tokens:
        return
    model, backend = runner.model, runner.attn_backend
    slots = backend.planner.slots
    among = shapes(
        tokens,
        min(REQUESTS, slots.requests + 1),
        longest=slots.longest,
        columns=slots.table.shape[1],
        unscored=unscored_length(model.model_config),
    )

    def body(ids: Tensor, step: Any) -> tuple[Tensor, Tensor | None]:
        found: tuple[Tensor, Tensor | None] = model.body(ids, step, backend.caches)
        return found

    with stages.stage("prompt graphs") as words:
        before = torch.cuda.mem_get_info()[0]
        try:
            prompts = PromptGraphs(backend.planner, body, among, runner.device)
            with parallel.graph_capture() as stream:
                prompts.capture(stream)
        except torch.OutOfMemoryError as error:
            raise UnsupportedError(
                f"{SWITCH}: expected memory to capture prompts of up to {max(tokens)} tokens, found too little"
                f" ({error}); lower --mem-fraction-static, or set {SWITCH}=0"
            ) from error
        backend.prompts = prompts
        words.append(f"{', '.join(map(str, sorted({shape.tokens for shape in among}))) or 'no'} tokens")
        words.append(f"{len(among)} graphs, {(before - torch.cuda.mem_get_info()[0]) / 1e9:.2f} GB")
