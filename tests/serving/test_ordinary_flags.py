"""A server with many of SGLang's ordinary flags together answers as transformers does."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from examples import function_calling
from tests.support.logprobs import check, generate
from tests.support.oracle import cached_hf_model
from tests.support.prompts import clear_ids
from tests.support.server import ServerPool

pytestmark = [pytest.mark.server, pytest.mark.timeout(900)]

FLAGS = (
    # scheduling
    *("--schedule-policy", "lof", "--enable-priority-scheduling", "--default-priority-value", "1"),
    *("--priority-scheduling-preemption-threshold", "5", "--retraction-policy", "priority"),
    *("--chunked-prefill-size", "512", "--max-prefill-tokens", "4096", "--prefill-max-requests", "4"),
    *("--max-running-requests", "8", "--max-queued-requests", "64", "--max-total-tokens", "8192"),
    *("--swa-full-tokens-ratio", "0.6", "--schedule-conservativeness", "0.8", "--scheduler-recv-interval", "2"),
    *("--prefill-decode-interval", "2", "--prefill-decode-interval-min-bs", "2", "--radix-eviction-policy", "lfu"),
    *("--random-seed", "3", "--gc-threshold", "700", "10", "10", "--watchdog-timeout", "200"),
    *("--soft-watchdog-timeout", "100"),
    # the front end
    *("--served-model-name", "deepseek", "--weight-version", "7", "--fastapi-root-path", "/models"),
    *("--return-input-ids", "--return-output-ids", "--preferred-sampling-params", '{"top_p": 0.9}'),
    *("--stream-interval", "2", "--batch-notify-size", "4", "--allow-auto-truncate"),
    *("--stream-response-default-include-usage", "--sampling-defaults", "openai"),
    *("--enable-dynamic-batch-tokenizer", "--dynamic-batch-tokenizer-batch-size", "8"),
    *("--dynamic-batch-tokenizer-batch-timeout", "0.001", "--default-chat-template-kwargs", '{"thinking": false}'),
    *("--constrained-json-disable-any-whitespace", "--constrained-json-max-whitespace-cnt", "4"),
    # logs and metrics
    *("--log-level", "info", "--log-level-http", "warning", "--log-requests", "--log-requests-level", "1"),
    *("--log-requests-format", "json", "--log-requests-target", "stdout", "--decode-log-interval", "1"),
    *("--enable-metrics", "--enable-metrics-for-all-schedulers", "--enable-request-time-stats-logging"),
    *("--crash-dump-folder", "dumps", "--export-metrics-to-file", "--export-metrics-to-file-dir", "metrics"),
    *("--uvicorn-access-log-exclude-prefixes", "/metrics", "--show-time-cost"),
    *("--extra-metric-labels", '{"team": "one"}', "--bucket-time-to-first-token", "0.1", "1", "10"),
    *("--prompt-tokens-buckets", "custom", "10", "100", "--generation-tokens-buckets", "default"),
    *("--gc-warning-threshold-secs", "1", "--load-snapshot-publish-interval", "5"),
    # without effect, which the log says
    *("--mamba-ssm-dtype", "float32"),
)


def test_answers_are_those_of_transformers(serve: ServerPool, tiny_checkpoints: Callable[[str], Path]) -> None:
    checkpoint = tiny_checkpoints("nvfp4-full")
    oracle, server = cached_hf_model(checkpoint), serve(checkpoint, *FLAGS)
    for length in (5, 300, 700):
        ids = clear_ids(oracle, length, seed=length)
        check(generate(server, ids, logprob_start_len=0), ids, oracle)
    ids = clear_ids(oracle, 700, seed=700)
    check(generate(server, ids), ids, oracle, cached=512)

    body = {"model": "deepseek", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4, "n": 2}
    assert len(server.post("/v1/chat/completions", body)["choices"]) == 2
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    constrained = {"type": "json_schema", "json_schema": {"name": "one", "schema": schema}}
    answer = server.post("/v1/chat/completions", body | {"max_tokens": 60, "response_format": constrained, "n": 1})
    text = answer["choices"][0]["message"]["content"]
    assert text == json.dumps(json.loads(text)), text
    # Random weights would mark the text as JSON; nothing but the flag keeps whitespace out.
    vocabulary = AutoTokenizer.from_pretrained(checkpoint).get_vocab()
    liked = {str(vocabulary[text]): 100 for text in ("t", "tr", "tru", "true") if text in vocabulary}
    call = function_calling.converse(server.url, extra_body={"logit_bias": liked})[1]
    assert [tool["function"]["name"] for tool in call["tool_calls"]] == ["get_weather"]

    assert server.get("/v1/models")["data"][0]["id"] == "deepseek"
    info = server.get("/server_info")
    assert (info["weight_version"], info["sampling_backend"]) == ("7", "pytorch")
    assert "--mamba-ssm-dtype float32: without effect for this model: for models with state spaces" in server.text()
    assert list((server.log.parent / "metrics").iterdir()), "no metrics were exported"
    assert all(json.loads(line[line.index("{") :]) for line in logged(server.text())) and logged(server.text())


def logged(text: str) -> list[str]:
    """Lines that hold a request in JSON."""
    return [line for line in text.splitlines() if '"rid"' in line and line.rstrip().endswith("}")]
