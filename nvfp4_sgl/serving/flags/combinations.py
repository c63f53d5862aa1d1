"""Checks of values, of contradictory flags, and of one that needs packages, before anything is loaded.

SGLang asserts the first kind itself, in words of its own and after the checkpoint has been read; what it asserts beside
these is :func:`nvfp4_sgl.serving.resolution.resolve`'s business.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from nvfp4_sgl.cache.layout import PAGE_TOKENS
from nvfp4_sgl.errors import ConfigError
from nvfp4_sgl.serving.flags import flag
from nvfp4_sgl.serving.flags.values import check_values
from nvfp4_sgl.serving.sglang import settings
from nvfp4_sgl.serving.sglang.private import VERSION

PRIORITY_POLICIES = ("fcfs", "lof")
"""Policies that SGLang combines with priorities."""
PROTOCOL = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"
"""Environment variable of OpenTelemetry."""
PROTOCOLS = ("grpc", "http/protobuf")
"""Its values that SGLang takes."""

LEAST: Mapping[str, int] = {
    "context_length": 1,
    "decode_log_interval": 1,
    "max_prefill_tokens": 1,
    "max_queued_requests": 1,
    "max_running_requests": 1,
    "max_total_tokens": 1,
    "tp_size": 1,
}
"""Smallest values of flags. SGLang takes smaller ones, and ends with a traceback, or never answers a request."""


def check_combinations(given: Mapping[str, Any]) -> None:
    """Refuse flags that cannot be honoured, alone or together.

    Raises:
        ConfigError: the message names them.
    """
    check_values(given)
    policy = given["schedule_policy"]
    if given["enable_priority_scheduling"] and policy not in PRIORITY_POLICIES:
        raise ConfigError(
            f"--enable-priority-scheduling with --schedule-policy {policy}: priorities need one of"
            f" {', '.join(PRIORITY_POLICIES)}; change --schedule-policy, or leave --enable-priority-scheduling out"
        )
    if given["retraction_policy"] == "priority" and not given["enable_priority_scheduling"]:
        raise ConfigError("--retraction-policy priority: expected --enable-priority-scheduling, too; add it")
    if given["enable_dynamic_batch_tokenizer"] and given["enable_tokenizer_batch_encode"]:
        raise ConfigError(
            "--enable-dynamic-batch-tokenizer with --enable-tokenizer-batch-encode: leave one of them out"
        )
    if given["export_metrics_to_file"] and given["export_metrics_to_file_dir"] is None:
        raise ConfigError("--export-metrics-to-file: expected --export-metrics-to-file-dir, too; add it")
    chunk = given["chunked_prefill_size"]
    if chunk is not None and chunk > 0 and chunk % PAGE_TOKENS:
        raise ConfigError(
            f"--chunked-prefill-size {chunk}: expected -1, or a multiple of {PAGE_TOKENS}, the tokens of a page"
        )
    for name, least in LEAST.items():
        if given[name] is not None and given[name] < least:
            raise ConfigError(f"{flag(name)} {given[name]}: expected {least} or more; leave it out for the default")
    check_name(given)
    if given["enable_trace"]:
        check_trace_packages()


def check_name(given: Mapping[str, Any]) -> None:
    """Refuse a name of the model with a colon, which SGLang keeps for adapters."""
    name = given["served_model_name"]
    if ":" in (given["model_path"] if name is None else name):
        found = f"--model-path {given['model_path']}" if name is None else f"--served-model-name {name}"
        raise ConfigError(f"{found}: a model's name has no colon; choose another by --served-model-name")


def check_trace_packages() -> None:
    """Refuse ``--enable-trace`` where SGLang cannot trace."""
    if not settings.can_trace():
        raise ConfigError(
            "--enable-trace: OpenTelemetry's SDK and exporter are not installed; run:"
            f" pip install 'sglang[tracing]=={VERSION}', or leave the flag out"
        )
    protocol = os.environ.get(PROTOCOL, "grpc")
    if protocol not in PROTOCOLS:
        raise ConfigError(f"{PROTOCOL}={protocol}: expected one of {', '.join(PROTOCOLS)}; unset it")
