"""SGLang's scheduler: its bounds, caches and metrics, and how it samples."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nvfp4_sgl.serving.sglang import settings
from nvfp4_sgl.serving.sglang.ledger import find


def shorten_requests(info: Any, *, pages: int) -> Any:
    """``info`` of the hook ``worker_info`` with requests that leave so many ``pages`` of the pool free.

    SGLang bounds prompt + answer by the fifth entry less 1, and keeps prompts below the sixth.
    """
    tokens, size = info[0], int(settings.resolved("page_size"))
    excess = max(0, info[4] - (tokens - pages * size + 1))
    return (*info[:4], info[4] - excess, info[5] - excess, *info[6:])


def forget_prefixes(tree_cache: Any) -> None:
    """Drop every cached prefix that no running request uses."""
    params = find("EvictParams")
    full, swa = tree_cache.full_evictable_size(), tree_cache.swa_evictable_size()
    tree_cache.evict(params(num_tokens=full, swa_num_tokens=swa))


def page_allocator(scheduler: Any) -> Any:
    """The allocator of requests' pages."""
    return scheduler.token_to_kv_pool_allocator


def pool_occupancy(scheduler: Any) -> dict[str, dict[str, int]]:
    """Capacity and occupancy of the token pools and request slots of SGLang's ``Scheduler``.

    ``cached`` tokens belong to finished requests and are given up on demand; ``used`` is what is left over: tokens of
    running requests, and any that leaked.
    """
    stats, requests = scheduler.pool_stats_observer.get_pool_stats(), scheduler.req_to_token_pool
    pools = {}
    for name in ("full", "swa"):
        values = {key: getattr(stats, f"{name}_{key}") for key in ("capacity", "available_size", "evictable_size")}
        if None not in values.values():
            capacity, free, cached = map(int, values.values())
            pools[name] = {"capacity": capacity, "free": free, "cached": cached, "used": capacity - free - cached}
    slots, free = int(requests.size), len(requests.free_slots)
    return {**pools, "requests": {"capacity": slots, "free": free, "cached": 0, "used": slots - free}}


def metric_labels(scheduler: Any) -> dict[str, Any] | None:
    """SGLang's own labels of the metrics of ``scheduler``; ``None`` if it publishes none."""
    reporter = scheduler.metrics_reporter
    return dict(reporter.metrics_collector.labels) if reporter.current_scheduler_metrics_enabled else None


def sampling_info(**fields: Any) -> Any:
    """Sampling parameters of a batch; the fields are those of SGLang's ``SamplingBatchInfo``."""
    return find("SamplingBatchInfo")(**fields)


def logits_output(logits: Tensor) -> Any:
    """The output of a forward pass for a sampler: fp32 ``logits`` [B, vocabulary]."""
    return find("LogitsProcessorOutput")(next_token_logits=logits)


def is_argmax_alone(info: Any, logprobs: bool, *, logprob_logits: Tensor | None = None) -> bool:
    """Whether SGLang's sampler takes the largest logits of a batch and does nothing else with them.

    Args:
        info: SGLang's, on how the batch is sampled. logprobs: whether log-probabilities are asked for.
        logprob_logits: what they are made of, if not of the logits that are sampled from.
    """
    return (
        info.is_all_greedy
        and not logprobs
        and logprob_logits is None
        and not info.has_custom_logit_processor
        and info.sampling_mask_batch_indices is None
    )


def agree_on_tokens(sampler: Any, tokens: Tensor, info: Any) -> None:
    """Make ``tokens``, int64 [B], those of all ranks, where SGLang's ``sampler`` does so: under grammars."""
    sampler._sync_token_ids_across_tp(tokens, info)


def hidden_output(hidden: Tensor) -> Any:
    """Output of a draft's pass whose logits are made outside of it: hidden states [T, d]."""
    return find("LogitsProcessorOutput")(next_token_logits=None, hidden_states=hidden)


def accepted_block(**fields: Any) -> Any:
    """Result of a round of DSpark; the fields are those of SGLang's ``AcceptOuts``."""
    return find("AcceptOuts")(**fields)


def requests(scheduler: Any) -> set[Any]:
    """Every request that ``scheduler`` holds: those that wait, for a grammar too, and those that run."""
    waiting = [*scheduler.waiting_queue, *scheduler.grammar_manager.grammar_queue]
    chunked = [] if scheduler.chunked_req is None else [scheduler.chunked_req]
    return {*waiting, *chunked, *scheduler.collect_inflight_reqs()}


def ending_tokens(request: Any) -> list[int]:
    """Ids that SGLang's ``min_new_tokens`` holds back: those that end an answer."""
    params, tokenizer = request.sampling_params, request.tokenizer
    found = set(params.stop_token_ids or ()) | set(request.eos_token_ids or ())
    if tokenizer is not None:
        found |= {*(tokenizer.additional_stop_token_ids or ()), tokenizer.eos_token_id} - {None}
    return sorted(found)


def positions(lengths: Tensor) -> Tensor:
    """Positions of a decode pass, int64 [B], by lengths, int64 [B]; a kernel."""
    return find("clamp_position")(lengths)


def mask_grammar(logits: Tensor, mask: Tensor) -> None:
    """Set ``logits`` [B, vocabulary] to -inf where the bits of ``mask``, int32 [B, vocabulary / 32], are 0."""
    find("apply_token_bitmask")(logits, mask)


def sample(scheduler: Any, logits: Tensor, info: Any) -> Tensor:
    """Token ids, int [B], that ``scheduler`` samples from fp32 [B, vocabulary], with all kinds of log-probabilities."""
    rows = len(logits)
    return scheduler.tp_worker.model_runner.sampler(
        logits_output(logits),
        info,
        True,
        [2] * rows,
        [[0, 1]] * rows,
        torch.zeros(rows, dtype=torch.int64, device=logits.device),
    )
