"""Every prompt that a server with a small window pool accepts is answered, whatever prefix of it is cached."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from nvfp4_sgl.errors import UnsupportedError
from nvfp4_sgl.serving import kv_pool
from nvfp4_sgl.serving.sglang import parallel, settings
from tests.support.full import but_for
from tests.support.server import Server, ServerPool

SECONDS = 20
"""For a prompt that takes less than one; one that is never scheduled takes for ever."""

# Flags, tokens of a prefill chunk, tokens of a first prompt, and prompts: how many of its tokens each goes on from, and
# how many others follow.
POOLS = {
    "1024": (("--max-total-tokens", "2048"), 256, 700, ((512, 300), (512, 1000), (256, 1), (256, 700))),
    "2048": (("--max-total-tokens", "4096", "--chunked-prefill-size", "2048"), 768, 1300, ((1024, 1000), (512, 1500))),
}


def tokens(count: int, seed: int) -> list[int]:
    drawn = random.Random(seed)
    return [20 + drawn.randrange(480) for _ in range(count)]


def answer(server: Server, ids: list[int]) -> int:
    """Have ``ids`` followed by a token in good time; how many of them were cached."""
    body = {"input_ids": ids, "sampling_params": {"max_new_tokens": 1, "temperature": 0, "ignore_eos": True}}
    return int(server.post("/generate", body, seconds=SECONDS)["meta_info"]["cached_tokens"])


@pytest.mark.server
@pytest.mark.timeout(300)
@pytest.mark.parametrize("window", but_for(POOLS, "2048"))
def test_prompts_after_a_cached_prefix(window: str, serve: ServerPool, tiny_checkpoints: Callable[[str], Path]) -> None:
    flags, chunk, base, prompts = POOLS[window]
    server = serve(tiny_checkpoints("nvfp4-full"), *flags)
    assert f"prefilled in chunks of {chunk} tokens" in server.text()
    longest = server.get("/v1/models")["data"][0]["max_model_len"] - 5
    first, cached = tokens(longest, 0), []
    for seed, (prefix, more) in enumerate(prompts, 1):
        answer(server, first[:base])
        cached.append(answer(server, first[:prefix] + tokens(more, seed)))
    assert any(cached), "no prompt went on from a cached prefix"
    answer(server, first)
    assert server.status("/generate", {"input_ids": [*first, 30], "sampling_params": {"max_new_tokens": 1}}) == 400


def test_chunks_by_pool(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Left alone where no prompt or chunk needs more, made smaller where one does, refused where none would do."""
    chosen: list[int] = []
    monkeypatch.setattr(settings, "set_prefill_chunk", chosen.append)
    monkeypatch.setattr(parallel, "tp_rank", lambda: 0)

    def fit(asked_for: int | None, window: int, context: int = 65536) -> int | None:
        chosen.clear()
        monkeypatch.setattr(settings, "prefill_chunk", lambda: asked_for)
        kv_pool.fit_chunk(2 * window, window, context)
        return chosen[0] if chosen else None

    assert fit(1024, 8192) is None and fit(1024, 2304) is None and fit(256, 1024) is None
    assert fit(None, 8192, context=3800) is None and fit(8192, 2048, context=700) is None
    assert not caplog.records
    assert fit(1024, 2048) == 768 and fit(1024, 1024) == 256 and fit(8192, 16384) == 7936
    assert "chunks of 7936" in caplog.messages[-1] and "--chunked-prefill-size: chunks of 8192" in caplog.messages[-1]
    assert fit(None, 8192) == 3840 and "no chunks" in caplog.messages[-1]
    with pytest.raises(UnsupportedError, match="found 768 tokens, expected at least 1024.*--max-total-tokens"):
        fit(256, 768)
