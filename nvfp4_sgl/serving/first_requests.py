"""Warms up, before the server is ready, what the first request of each kind would otherwise wait for.

Around the model SGLang runs functions that compile at their first call:

* ``torch.compile``: the repetition penalty (``apply_scaling_penalties``), sampling by a seed
  (``multinomial_with_seed``) and a check of SGLang's own tests. :func:`compile_nothing` makes them run as written.
* Triton: greedy tokens, masks of grammars, and the allocator of pages, which has a kernel for each power of two of
  requests. A copy of a step's inputs has one for each alignment of their addresses, so torch copies them instead
  (:func:`copy_by_torch`).
* nvcc: positions of a decode pass, once, and FlashInfer's sampling, which is refused
  (:mod:`nvfp4_sgl.serving.flags.kernels`).

The rest of sampling is torch's own operators, whose code is loaded at the first call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from nvfp4_sgl.errors import UnsupportedError
from nvfp4_sgl.serving import finite_logits
from nvfp4_sgl.serving.sglang import scheduling
from nvfp4_sgl.triton_kernels.common.integers import cdiv

ROWS = (1, 2, 16)
"""Triton has programs of their own for a count of one and for multiples of 16. As many rows as there may be come last:
top-p sorts the vocabulary for each, which takes 1 GB and more for 256."""

PADDING = 64
"""SGLang pads the LM head's rows to a multiple."""

GREEDY = ("is_all_greedy", "is_any_greedy")
NEEDS = ("need_top_p_sampling", "need_top_k_sampling", "need_min_p_sampling")
KINDS: tuple[dict[str, Any], ...] = (
    dict.fromkeys(GREEDY, True),
    {},
    {"need_top_p_sampling": True},
    {"need_top_k_sampling": True, "max_top_k": 4},
    {"need_top_p_sampling": True, "need_top_k_sampling": True, "need_min_p_sampling": True},
)
"""What distinguishes the ways to sample a batch, in SGLang's ``SamplingBatchInfo``: greedy, by temperature, top-p,
top-k, and a batch of all of them."""


def copy_by_torch(original: Callable[..., bool], *tensors: Any) -> bool:
    """Hook around SGLang's Triton kernel that copies small inputs of a step: torch copies them, a launch a dtype.

    SGLang's kernel would be compiled again for some sizes of batches after the server is ready.
    """
    return False


def compile_nothing() -> None:
    """Make ``torch.compile`` leave functions as they are, in this process."""
    torch._dynamo.config.disable = True


@torch.no_grad()
def warm_up(scheduler: Any) -> None:
    """Run, for each kind of request, the code around the model.

    Args:
        scheduler: SGLang's ``Scheduler``, which has no request yet.

    Raises:
        UnsupportedError: as many requests as may run together cannot be sampled in the memory that is left.
    """
    most = int(scheduler.max_running_requests)
    scheduling.positions(torch.ones(1, dtype=torch.int64, device=scheduler.device))
    allocate(scheduling.page_allocator(scheduler), torch.device(scheduler.device), most)
    for rows in dict.fromkeys((*ROWS, most)):
        for kind in KINDS:
            try:
                sample(scheduler, rows, kind)
            except torch.OutOfMemoryError as error:
                raise UnsupportedError(
                    f"--max-running-requests {most}: expected memory to sample {rows} requests at once, found"
                    f" too little ({error}); lower --mem-fraction-static or --max-running-requests"
                ) from error
    choose(torch.device(scheduler.device), scheduler.model_config.vocab_size)


def sizes(most: int) -> Iterator[int]:
    """Powers of two up to ``most``, and ``most``."""
    rows = 1
    while rows < most:
        yield rows
        rows *= 2
    yield most


def allocate(allocator: Any, device: torch.device, most: int, *, drafted: bool = False) -> None:
    """Give pages to as many requests as there may be, with one token and then with two, and take all of them back.

    Args:
        allocator: SGLang's allocator, of which nothing is taken.
        most: requests that may run together.
        drafted: as rounds of drafts do, whose lengths are int32, and which have no decode pass.
    """
    dtype = torch.int32 if drafted else torch.int64
    for rows in sizes(most):
        # Lengths are wanted on the device and on the host.
        none, one, two = (torch.full((rows,), length, dtype=dtype) for length in (0, 1, 2))
        before = torch.full((rows,), -1, dtype=dtype, device=device)
        taken = allocator.alloc_extend(none.to(device), none, one.to(device), one, before, rows)
        if taken is None:  # the pool holds fewer requests
            break
        if not drafted:
            taken = torch.cat([taken, allocator.alloc_decode(two.to(device), two, taken.to(torch.int32))])
        allocator.free(taken)
        allocator.clear()


def sample(scheduler: Any, rows: int, kind: dict[str, Any]) -> None:
    """Sample a batch of ``rows`` requests of one of :data:`KINDS`, with penalties, biases and log-probabilities.

    On a GPU a grammar's mask, which forbids nothing, is applied, too.
    """
    device, vocabulary = torch.device(scheduler.device), scheduler.model_config.vocab_size
    logits = torch.zeros(rows, vocabulary, device=device)
    info = scheduling.sampling_info(
        temperatures=torch.ones(rows, 1, device=device),
        top_ps=torch.full((rows,), 0.9, device=device),
        top_ks=torch.full((rows,), 4, dtype=torch.int32, device=device),
        min_ps=torch.full((rows,), 0.1, device=device),
        vocab_size=vocabulary,
        acc_additive_penalties=torch.zeros_like(logits),
        acc_scaling_penalties=torch.ones_like(logits),
        logit_bias=torch.zeros_like(logits),
        device=device.type,
        **(dict.fromkeys((*GREEDY, *NEEDS), False) | kind),
    )
    if device.type == "cuda":
        scheduling.mask_grammar(logits, torch.full((rows, -(-vocabulary // 32)), -1, dtype=torch.int32, device=device))
    info.apply_logits_bias(logits)
    scheduling.sample(scheduler, logits, info)


def choose(device: torch.device, vocabulary: int) -> None:
    """Take the largest logits of rows in both layouts: whole, and with padding that SGLang has cut off."""
    padded = torch.zeros(2, cdiv(vocabulary, PADDING) * PADDING, device=device)[:, :vocabulary]
    for logits in (padded, padded.contiguous()):
        finite_logits.choose(logits)


HOOKS: dict[str, Callable[..., Any]] = {"copy_inputs": copy_by_torch}
"""What is installed into the scheduler of our model, by name in :data:`nvfp4_sgl.serving.sglang.hooked.HOOKS`."""
