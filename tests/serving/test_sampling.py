"""Sampling of every kind, alone and mixed in one batch; and that nothing is compiled for it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nvfp4_sgl.config import read_config_json
from nvfp4_sgl.errors import UnsupportedError
from nvfp4_sgl.serving import arguments, first_requests
from nvfp4_sgl.serving.sglang import settings
from tests.support.bf16_logprobs import prompt
from tests.support.sampling import require_bias, require_kinds, require_penalties

IDS = prompt(40, seed=8)


@pytest.mark.server
def test_every_kind_draws_from_what_it_leaves(serve: Any, checkpoint: Path) -> None:
    require_kinds(serve(checkpoint), IDS, read_config_json(checkpoint)["vocab_size"])


@pytest.mark.server
def test_penalties(serve: Any, checkpoint: Path) -> None:
    require_penalties(serve(checkpoint), IDS, read_config_json(checkpoint)["vocab_size"])


@pytest.mark.server
def test_a_bias(serve: Any, checkpoint: Path) -> None:
    require_bias(serve(checkpoint), IDS)


@pytest.mark.server
def test_the_warm_up_leaves_the_pools_empty(serve: Any, checkpoint: Path) -> None:
    server = serve(checkpoint)
    server.command("/flush_cache?timeout=30", {})
    for name, pool in server.info()["pools"].items():
        assert pool["free"] == pool["capacity"], name


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_torch_samples_by_default(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU SGLang's own default is FlashInfer's, which compiles at the first request."""
    given = {"kv_cache_dtype": "auto", "swa_full_tokens_ratio": None}
    monkeypatch.setattr(arguments, "is_our_checkpoint", lambda path: True)
    monkeypatch.setattr(settings, "given_arguments", lambda server_args: given)
    monkeypatch.setattr(settings, "resolving", lambda server_args: SimpleNamespace(device=device), raising=False)
    declared = arguments.defaults(SimpleNamespace(model_path="here"), SimpleNamespace(model_type="deepseek_v4"))
    assert declared["sampling_backend"] == "pytorch"


def test_nothing_is_compiled_by_torch() -> None:
    """Neither what SGLang had compiled when it was imported nor what comes later."""
    import torch._dynamo
    from sglang.srt.sampling.penaltylib.repetition_penalty import apply_scaling_penalties
    from torch._dynamo.utils import counters

    def refuse(module: Any, inputs: Any) -> Any:
        raise RuntimeError("compiled")

    def increment(value: torch.Tensor) -> torch.Tensor:
        return value + 1

    def decrement(value: torch.Tensor) -> torch.Tensor:
        return value - 1

    # Not by monkeypatch: it deletes the setting at its end, and later tests could not compile.
    with torch._dynamo.config.patch(disable=False):
        with pytest.raises(Exception, match="compiled"):
            torch.compile(increment, backend=refuse)(torch.zeros(2))
        first_requests.compile_nothing()
        counters.clear()
        logits = torch.tensor([[2.0, -2.0]])
        apply_scaling_penalties(logits, torch.full((1, 2), 2.0))
        assert torch.compile(decrement, backend=refuse)(torch.zeros(2)).tolist() == [-1, -1]
        assert logits.tolist() == [[1, -4]] and not counters["frames"]


def test_sizes() -> None:
    assert list(first_requests.sizes(1)) == [1]
    assert list(first_requests.sizes(12)) == [1, 2, 4, 8, 12]
    assert list(first_requests.sizes(16)) == [1, 2, 4, 8, 16]


class Pages:
    """An allocator with room for ``requests``."""

    def __init__(self, requests: int):
        self.requests, self.taken, self.cleared = requests, 0, 0

    def alloc_extend(self, none: Any, none_cpu: Any, one: Any, one_cpu: Any, before: Any, tokens: int) -> Any:
        assert none.tolist() == none_cpu.tolist() and one.tolist() == one_cpu.tolist() and len(before) == tokens
        if tokens > self.requests:
            return None
        self.taken += tokens
        return torch.arange(tokens)

    def alloc_decode(self, two: Any, two_cpu: Any, last: Any) -> Any:
        self.taken += len(last)
        return torch.arange(len(last))

    def free(self, slots: Any) -> None:
        self.taken -= len(slots)

    def clear(self) -> None:
        self.cleared += 1


def test_a_pool_smaller_than_what_may_run() -> None:
    pages = Pages(6)
    first_requests.allocate(pages, torch.device("cpu"), 16)
    assert pages.taken == 0 and pages.cleared == 3


@pytest.fixture
def warmed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows that the warm-up samples; all else that it does is left out."""
    rows: list[int] = []
    monkeypatch.setattr(first_requests, "sample", lambda scheduler, count, kind: rows.append(count))
    monkeypatch.setattr(first_requests, "allocate", lambda *_: None)
    monkeypatch.setattr(first_requests.scheduling, "positions", lambda lengths: None)
    monkeypatch.setattr(first_requests.scheduling, "page_allocator", lambda scheduler: None)
    return rows


def scheduler(requests: int) -> Any:
    return SimpleNamespace(device="cpu", max_running_requests=requests, model_config=SimpleNamespace(vocab_size=100))


@pytest.mark.parametrize(("requests", "most"), [(16, 16), (40, 40), (2, 16)])
def test_every_kind_is_sampled_by_as_many_requests_as_may_run(requests: int, most: int, warmed: list[int]) -> None:
    first_requests.warm_up(scheduler(requests))
    assert max(warmed) == most and all(warmed.count(rows) == len(first_requests.KINDS) for rows in warmed)


def test_too_little_memory_to_sample_a_full_batch(warmed: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Said at the start, not at the first such batch, which would end the server."""

    def allocate_much(scheduler: Any, rows: int, kind: Any) -> None:
        if rows == 300:
            raise torch.OutOfMemoryError("tried to allocate 2 GiB")

    monkeypatch.setattr(first_requests, "sample", allocate_much)
    with pytest.raises(UnsupportedError, match="--max-running-requests 300.*2 GiB.*lower --mem-fraction-static"):
        first_requests.warm_up(scheduler(300))
