"""``/metrics`` of a server with ``--enable-metrics``: ours beside SGLang's, and the dashboard that shows both."""

from __future__ import annotations

import json
import re
import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nvfp4_sgl.config import LayerKind, ModelConfig
from nvfp4_sgl.serving.metrics import entries, occupancy
from nvfp4_sgl.serving.sglang import request_state
from tests.packaging.checkout import ROOT
from tests.support.chat import MODEL, client
from tests.support.logprobs import flush
from tests.support.metrics import scrape, value
from tests.support.prompts import draw_ids
from tests.support.server import Server

DASHBOARD = ROOT / "launch" / "grafana" / "nvfp4_sgl.json"
VOCABULARY, PAGE = 512, 256


# --- without a server -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def config(tiny_checkpoints: Callable[[str], Path]) -> ModelConfig:
    return ModelConfig.from_dir(tiny_checkpoints("nvfp4-full"))


def test_entries_of_ragged_lengths(config: ModelConfig) -> None:
    """Counted entry by entry: a query at position p sees a window of R tokens once all of it lies at or before p."""
    lengths = [1, 3, 4, 127, 128, 4 * config.index_topk + 3, 4 * config.index_topk + 4, 1500]
    for kind in (LayerKind.CSA, LayerKind.HCA):
        seen = [sum((position + 1) % kind.value == 0 for position in range(n)) for n in lengths]
        read = [len(range(count)[: config.index_topk]) if kind is LayerKind.CSA else count for count in seen]
        assert entries(config, kind, lengths) == (sum(seen), sum(read))
        assert kind is LayerKind.HCA or sum(read) < sum(seen)
        assert entries(config, kind, []) == (0, 0)


@pytest.mark.parametrize(("rows", "lengths"), [(None, [13, 43]), (3, [13, 14, 15, 43, 44, 45])])
def test_a_pass_too_many_is_not_counted(rows: int | None, lengths: list[int]) -> None:
    """Under the overlap schedule a request that has ended runs one pass more, and a retracted one may.

    With drafts a pass has several rows of a request.
    """

    def request(tokens: int, *, finished: bool = False, retracted: bool = False) -> SimpleNamespace:
        return SimpleNamespace(
            origin_input_ids=[7] * tokens, output_ids=[7] * 3, finished=lambda: finished, is_retracted=retracted
        )

    requests = [request(10), request(20, finished=True), request(30, retracted=True), request(40)]
    result = SimpleNamespace(speculative_num_draft_tokens=rows)
    assert request_state.decoding_lengths(SimpleNamespace(reqs=requests), result) == lengths


def test_rows_that_pools_of_tokens_stand_for(config: ModelConfig) -> None:
    full = {"capacity": 2048, "used": 512, "cached": 256, "free": 1280}
    swa = {"capacity": 1024, "used": 256, "cached": 0, "free": 768}
    requests = {"capacity": 16, "used": 3, "cached": 0, "free": 13}
    rows = occupancy(config, {"full": full, "swa": swa, "requests": requests})
    assert rows["csa_entries"] == rows["csa_index_keys"] == {"capacity": 512, "used": 128, "cached": 64}
    assert rows["hca_entries"] == {"capacity": 16, "used": 4, "cached": 2}
    assert rows["csa_states"] == {"capacity": 32, "used": 8, "cached": 0}
    assert rows["hca_states"] == {"capacity": 2048, "used": 384, "cached": 0}
    assert rows["full"] == full and rows["swa"] == swa and rows["requests"] == requests


# --- a real server ----------------------------------------------------------------------------------------------


@pytest.mark.server
def test_what_runs(watched: Server) -> None:
    samples, info = scrape(watched), watched.info()
    (about,) = samples["nvfp4_sgl_info"]
    assert {name: info[name] for name in ("version", "target", "activation_mode", "kv_rows")}.items() <= dict(
        about
    ).items()
    found = {dict(labels)["boundary"]: dict(labels)["op"] for labels in samples["nvfp4_sgl_boundary"]}
    assert found == info["boundaries"]


@pytest.mark.server
def test_entries_of_one_request(watched: Server, config: ModelConfig) -> None:
    """The first token comes from the prefill; every later one from a decode pass that ends with the one before it."""
    prompt, tokens = 4 * config.index_topk + 90, 40
    before = scrape(watched)
    watched.generate(draw_ids(prompt, 11, VOCABULARY), tokens)
    after = scrape(watched)
    lengths = range(prompt + 1, prompt + tokens)

    def gained(name: str, **labels: str) -> float:
        return value(after, name, **labels) - value(before, name, **labels)

    assert gained("nvfp4_sgl_decode_queries_total") == tokens - 1
    for kind in (LayerKind.CSA, LayerKind.HCA):
        available, chosen = entries(config, kind, list(lengths))
        assert gained("nvfp4_sgl_entries_available_total", kind=kind.name.lower()) == available
        assert gained("nvfp4_sgl_entries_chosen_total", kind=kind.name.lower()) == chosen


@pytest.mark.server
def test_pools_and_prefix_hits(watched: Server) -> None:
    """How full the pools are is ours; what came from the prefix cache SGLang counts itself."""
    flush(watched)
    ids = draw_ids(2 * PAGE + 30, 12, VOCABULARY)
    watched.generate(ids, 2)
    before = scrape(watched)
    answer = watched.generate(ids, 2)
    after = scrape(watched)
    assert answer["meta_info"]["cached_tokens"] == 2 * PAGE
    for name, expected in (("sglang:prompt_tokens_total", len(ids)), ("sglang:cached_tokens_total", 2 * PAGE)):
        assert value(after, name) - value(before, name) == expected
    pools = watched.info()["pools"]
    for kind in ("full", "swa", "requests"):
        assert value(after, "nvfp4_sgl_pool_capacity", kind=kind) == pools[kind]["capacity"] > 0
    for kind, rows in (("full", 2 * PAGE), ("csa_entries", 2 * PAGE // LayerKind.CSA.value)):
        # As SGLang's own gauges, as of the last prefill or of the moment of idleness after it.
        held = [value(after, f"nvfp4_sgl_pool_{state}", kind=kind) for state in ("used", "cached")]
        assert rows <= sum(held) < value(after, "nvfp4_sgl_pool_capacity", kind=kind)


@pytest.mark.server
def test_answers_say_what_was_cached(watched: Server) -> None:
    """By default: no flag is needed."""
    flush(watched)
    messages: Any = [{"role": "user", "content": "wieder und wieder " * 60}]
    usages = [
        client(watched).chat.completions.create(model=MODEL, messages=messages, max_tokens=2).usage for _ in range(2)
    ]
    cached = [usage.prompt_tokens_details.cached_tokens for usage in usages]
    assert cached == [0, (usages[1].prompt_tokens - 1) // PAGE * PAGE] and cached[1] > 0


@pytest.mark.server
def test_only_the_exact_path(watched: Server) -> None:
    """SGLang answers every path that begins so."""
    for path in ("/metricsandmore", "/metrics/more"):
        with pytest.raises(urllib.error.HTTPError, match="404"):
            watched.get(path)


@pytest.mark.server
def test_a_step_is_profiled(watched: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """As launch/profile_host does: its requests decode while it looks, and are gone afterwards."""
    monkeypatch.setattr(sys, "path", [str(ROOT / "launch"), *sys.path])
    from programs.profile_host import measure

    found = measure(watched.url, 2, seconds=2.2, tokens=2000)
    assert not found.own and sum(found.stages.values()) == pytest.approx(found.step)
    # On a CPU a step computes where it is launched.
    assert found.stages["run_batch"] > 0.3 * found.step and found.stages["idle"] < 0.3 * found.step
    flush(watched)


@pytest.mark.server
def test_the_dashboard_asks_for_what_there_is(watched: Server) -> None:
    for _ in range(2):  # the second one has a cached prefix, and only a stream has a time between tokens
        watched.generate(draw_ids(2 * PAGE, 13, VOCABULARY), 2)
        messages: Any = [{"role": "user", "content": "und"}]
        list(client(watched).chat.completions.create(model=MODEL, messages=messages, max_tokens=6, stream=True))
    names = set(scrape(watched))
    asked = names_in(json.loads(DASHBOARD.read_text(encoding="utf-8")))
    assert len(asked) > 12 and asked - names == set()
    assert {name for name in names if name.startswith("nvfp4_sgl_") and not name.endswith("_created")} <= asked


def names_in(dashboard: dict[str, Any]) -> set[str]:
    """Names of metrics in the expressions of a dashboard."""
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    return {name for one in expressions for name in re.findall(r"\b(?:sglang:|nvfp4_sgl_)\w+", one)}
