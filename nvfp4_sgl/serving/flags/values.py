"""Values of flags that SGLang does not check, or checks after the model is loaded: numbers, ports, levels, objects.

A test demands a check here for each such flag that works. With other values a server ends in a traceback, in a thread
of its own or at its first request, or it answers every request with an error.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from nvfp4_sgl.errors import ConfigError
from nvfp4_sgl.serving.fields.checks import Check, array_of, found, integer, number, plain
from nvfp4_sgl.serving.fields.field import refused
from nvfp4_sgl.serving.fields.generate import SAMPLING_PARAMS
from nvfp4_sgl.serving.fields.objects import structure
from nvfp4_sgl.serving.fields.openai import REASONING_SWITCHES
from nvfp4_sgl.serving.flags import flag

MAX_SECONDS = 1e8
"""Bound on times, three years: a thread cannot wait for ever."""
LARGEST = 1e30
"""Bound on numbers that have no other."""
PORTS = integer(0, 2**16 - 1)
"""A port that a server listens on; 0: one that is free."""

LEVELS = ("critical", "error", "warning", "info", "debug")
"""Levels that Python's ``logging`` and uvicorn both have."""

LABEL = re.compile(r"(?!__)[A-Za-z_][A-Za-z0-9_]*")
"""Names of labels that Prometheus takes; those that begin with two underscores are its own."""


def level(*more: str) -> Check:
    """A level of logs, in any case."""
    known = (*LEVELS, *more)
    return plain(
        f"one of {', '.join(known)}",
        lambda value: isinstance(value, str) and value.lower() in known,
        inside=(*known, "INFO"),
        outside=("foo", "", "20", 20, "notset"),
    )


def ascending() -> Check:
    """Upper bounds of a histogram's buckets."""
    numbers = array_of(number(-LARGEST, LARGEST), least=1)
    expected = "numbers, each above the one before it"

    def fault(where: str, value: Any) -> str | None:
        if (wrong := numbers.fault(where, value)) is not None:
            return wrong
        return None if sorted(set(value)) == value else found(where, value, expected)

    return Check(expected, fault, ([0.1], [0.1, 1, 10]), (*numbers.outside, [1, 1], [2, 1], [float("nan")]))


def labels() -> Check:
    """An object of labels and their values."""
    return plain(
        "an object of labels, letters, digits and underscores, and strings",
        lambda value: (
            isinstance(value, dict)
            and all(LABEL.fullmatch(name) and isinstance(one, str) for name, one in value.items())
        ),
        inside=({}, {"team": "one"}),
        outside=([], "team", 5, {"team": 1}, {"a-b": "x"}, {"__name__": "x"}, {"team": None}),
    )


def numbers() -> Check:
    """An object of names and finite numbers."""
    one = number(-LARGEST, LARGEST)
    return plain(
        "an object of names and numbers",
        lambda value: isinstance(value, dict) and all(one.fault("", it) is None for it in value.values()),
        inside=({}, {"threshold": 5}),
        outside=([], "threshold", 5, {"threshold": "5"}, {"threshold": float("nan")}, {"threshold": True}),
    )


SAMPLING_DEFAULTS = {**SAMPLING_PARAMS, "n": refused("SGLang reads it in a request alone; leave it out")}
"""What ``--preferred-sampling-params`` may have: what a request's ``sampling_params`` may, but ``n``."""

VALUES: Mapping[str, Check] = {
    "bucket_e2e_request_latency": ascending(),
    "bucket_inter_token_latency": ascending(),
    "bucket_time_to_first_token": ascending(),
    "default_chat_template_kwargs": structure(REASONING_SWITCHES),
    "dynamic_batch_tokenizer_batch_timeout": number(0, MAX_SECONDS),
    "extra_metric_labels": labels(),
    "gc_warning_threshold_secs": number(0, MAX_SECONDS),
    "log_level": level(),
    "log_level_http": level("trace"),
    "mem_fraction_static": number(0, 1, above=True),
    "nccl_port": PORTS,
    "port": PORTS,
    "preferred_sampling_params": structure(SAMPLING_DEFAULTS),
    "radix_eviction_policy_config": numbers(),
    "schedule_conservativeness": number(0, LARGEST),
    "soft_watchdog_timeout": number(0, MAX_SECONDS, above=True),
    "swa_full_tokens_ratio": number(0, 1, above=True),
    "watchdog_timeout": number(0, MAX_SECONDS, above=True),
}
"""What flags that work may be, beside left out."""


def check_value(name: str, value: Any) -> None:
    """Refuse a ``value`` of the flag ``name`` that :data:`VALUES` does not allow."""
    if name == "preferred_sampling_params" and isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise ConfigError(f"{flag(name)}: not valid JSON ({error})") from error
    if value is not None and (fault := VALUES[name].fault(flag(name), value)) is not None:
        raise ConfigError(fault)


def check_values(given: Mapping[str, Any]) -> None:
    """Refuse values of flags that :data:`VALUES` does not allow.

    Raises:
        ConfigError: the message names the flag.
    """
    for name in VALUES:
        check_value(name, given[name])
