"""Every argument and choice of SGLang is in one table, and each table says the truth."""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nvfp4_sgl import pushed_sums
from nvfp4_sgl.errors import ConfigError, UnsupportedError
from nvfp4_sgl.serving import arguments, flags, resolution
from nvfp4_sgl.serving.flags import combinations, values
from nvfp4_sgl.serving.flags.kernels import BACKEND
from nvfp4_sgl.serving.flags.row import Refused, WithoutEffect, Works
from nvfp4_sgl.serving.sglang import settings
from nvfp4_sgl.targets.choose import choose
from tests.support import resolved_flags
from tests.support.flag_values import ALONE, NEEDS_FILES, NEEDS_MORE, TOGETHER, VALUES

ROOT = Path(__file__).resolve().parents[2]
SWITCHES = ("_StoreTrueAction", "BooleanOptionalAction", "DeprecatedStoreTrueAction")


def rows(kind: type) -> list[str]:
    return [name for name, row in flags.ROWS.items() if isinstance(row, kind)]


@pytest.fixture(scope="module")
def unset() -> dict[str, Any]:
    """Every argument of SGLang as it is when no flag is given."""
    return settings.unset_arguments()


@pytest.fixture(scope="module")
def options() -> dict[str, list[argparse.Action]]:
    """SGLang's options by the argument that they set."""
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    found: dict[str, list[argparse.Action]] = {}
    for action in parser._actions:
        found.setdefault(action.dest, []).append(action)
    return found


def unknown(names: set[str]) -> tuple[set[str], set[str]]:
    """Arguments of SGLang that no table knows, and rows of arguments that SGLang lacks."""
    return names - flags.ROWS.keys() - set(flags.INTERNAL), (flags.ROWS.keys() | set(flags.INTERNAL)) - names


def test_every_argument_is_in_a_table(unset: dict[str, Any]) -> None:
    assert unknown(set(unset)) == (set(), set())
    assert unknown({*unset, "novelty"} - {"port"}) == ({"novelty"}, {"port"})


def test_every_argument_is_in_one_table_only() -> None:
    assert sum(map(len, flags.TABLES.values())) == len(flags.ROWS)


def test_every_choice_is_in_its_row(options: dict[str, list[argparse.Action]]) -> None:
    """Every choice of an argument that works is in its row; a refused or effect-less row covers all of its choices."""
    for name, actions in options.items():
        row, choices = flags.ROWS.get(name), {choice for action in actions for choice in action.choices or ()}
        if isinstance(row, Works) and choices:
            listed = {value for value in (row.values or ()) if value is not None} | set(row.refused)
            assert listed == choices - {BACKEND}, name


def test_flags_are_spelled_as_sglang_does(options: dict[str, list[argparse.Action]]) -> None:
    for name in flags.ROWS:
        spelled = [option for action in options.get(name, ()) for option in action.option_strings]
        assert not spelled or flags.flag(name) in spelled, name
    assert flags.SPELLED.keys() <= options.keys()


@pytest.mark.parametrize("name", rows(Works))
def test_what_shows_that_a_flag_works_exists(name: str) -> None:
    row = flags.ROWS[name]
    assert isinstance(row, Works) and len(row.shown) > 15
    for file, test in re.findall(r"(tests/[\w/]+\.py)(?:::(\w+))?", row.shown):
        assert f"def {test}(" in (ROOT / file).read_text() if test else (ROOT / file).exists(), row.shown


def test_no_flag_at_all_is_accepted(unset: dict[str, Any]) -> None:
    arguments.check_arguments(unset)
    combinations.check_combinations(unset)
    assert not list(flags.without_effect(unset, unset))


@pytest.mark.parametrize(
    ("given", "traces", "words"),
    [
        ({"tp_size": 4}, "", None),
        ({"tp_size": 1}, "", "expected --tp-size 2, 4 or 8, found 1"),
        ({"tp_size": 2, "disable_custom_all_reduce": True}, "", "found --disable-custom-all-reduce"),
        ({"tp_size": 2}, "traces", "found NVFP4_SGL_TRACE"),
    ],
)
def test_pushed_sums_are_refused_where_they_cannot_be(
    given: dict[str, Any], traces: str, words: str | None, unset: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(pushed_sums.SWITCH, "1")
    monkeypatch.setenv("NVFP4_SGL_TRACE", traces)
    with pytest.raises(ConfigError, match="expected a server for sm_90a, found cpu"):
        arguments.check_arguments(unset | given)
    monkeypatch.setattr(arguments, "detect_target", lambda: "sm_90a")
    with nullcontext() if words is None else pytest.raises(ConfigError, match=words):
        arguments.check_arguments(unset | given)


@pytest.mark.parametrize("name", rows(Refused))
def test_what_is_refused(name: str, unset: dict[str, Any]) -> None:
    row = flags.ROWS[name]
    assert isinstance(row, Refused)
    for value in row.off:
        arguments.check_arguments(unset | {name: value})
    with pytest.raises(UnsupportedError, match=f"^{flags.flag(name)} 7: .*(leave the flag out|remove the flag)"):
        arguments.check_arguments(unset | {name: 7})


@pytest.mark.parametrize("name", rows(Works))
def test_values_that_are_refused(name: str, unset: dict[str, Any]) -> None:
    row = flags.ROWS[name]
    assert isinstance(row, Works)
    for value in row.refused:
        with pytest.raises(ConfigError, match=f"^{flags.flag(name)} {value}: expected one of "):
            arguments.check_arguments(unset | {name: value})


@pytest.mark.parametrize("name", rows(WithoutEffect))
def test_what_has_no_effect_is_said(name: str, unset: dict[str, Any]) -> None:
    given = unset | {name: "seven"}
    arguments.check_arguments(given)
    (line,) = flags.without_effect(given, unset)
    assert line.startswith(f"{flags.flag(name)} seven: without effect for this model: ")


def test_an_argument_that_nobody_knows_is_refused(unset: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedError, match="^--novelty: unknown"):
        arguments.check_arguments(unset | {"novelty": 1})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"enable_priority_scheduling": True, "schedule_policy": "lpm"},
            "--enable-priority-scheduling with --schedule-policy lpm: priorities need one of fcfs, lof",
        ),
        ({"retraction_policy": "priority"}, "--retraction-policy priority: expected --enable-priority-scheduling"),
        ({"export_metrics_to_file": True}, "--export-metrics-to-file: expected --export-metrics-to-file-dir"),
        ({"context_length": 0}, "--context-length 0: expected 1 or more"),
        ({"context_length": -5}, "--context-length -5: expected 1 or more"),
        ({"tp_size": 0}, "--tp-size 0: expected 1 or more"),
        ({"tp_size": -1}, "--tp-size -1: expected 1 or more"),
        ({"decode_log_interval": 0}, "--decode-log-interval 0: expected 1 or more"),
        ({"max_prefill_tokens": -1}, "--max-prefill-tokens -1: expected 1 or more"),
        ({"max_running_requests": -1}, "--max-running-requests -1: expected 1 or more"),
        ({"max_queued_requests": -1}, "--max-queued-requests -1: expected 1 or more"),
        ({"max_total_tokens": 0}, "--max-total-tokens 0: expected 1 or more"),
        ({"mem_fraction_static": 2.0}, "--mem-fraction-static: found 2.0; expected a number above 0 to 1"),
        ({"mem_fraction_static": float("nan")}, "--mem-fraction-static: found nan; expected a number"),
        ({"chunked_prefill_size": 1000}, "--chunked-prefill-size 1000: expected -1, or a multiple of 256"),
        ({"served_model_name": "deepseek:v4"}, "--served-model-name deepseek:v4: a model's name has no colon"),
        ({"model_path": "/models/deepseek:v4"}, "--model-path /models/deepseek:v4: a model's name has no colon"),
        (
            {"enable_dynamic_batch_tokenizer": True, "enable_tokenizer_batch_encode": True},
            "--enable-dynamic-batch-tokenizer with --enable-tokenizer-batch-encode",
        ),
    ],
)
def test_flags_that_contradict_each_other(given: dict[str, Any], message: str, unset: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        combinations.check_combinations(unset | given)


def is_to_be_checked(name: str, actions: list[argparse.Action]) -> bool:
    """Whether SGLang takes the flag as a number, a port, a level or an object, and does not check it."""
    by_type = any(action.type in (float, json.loads) for action in actions)
    return by_type or name.endswith("_port") or name == "port" or name.startswith("log_level")


def test_numbers_ports_levels_and_objects_are_checked(options: dict[str, list[argparse.Action]]) -> None:
    """Each such flag that works has a row, also one that SGLang adds."""
    expected = {name for name, actions in options.items() if is_to_be_checked(name, actions)}
    assert expected & set(rows(Works)) == set(values.VALUES)


@pytest.mark.parametrize("name", values.VALUES)
def test_values_that_sglang_does_not_check(name: str, unset: dict[str, Any]) -> None:
    check = values.VALUES[name]
    for value in check.inside:
        combinations.check_combinations(unset | {name: value})
    for value in check.outside:
        if (name, value) == ("preferred_sampling_params", "{}"):
            continue  # SGLang parses a string
        with pytest.raises(ConfigError, match=re.escape(flags.flag(name))):
            combinations.check_combinations(unset | {name: value})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        *(
            ({"watchdog_timeout": value}, "--watchdog-timeout: found")
            for value in (0, -1.0, float("nan"), float("inf"))
        ),
        ({"port": -1}, "--port: found -1; expected an integer from 0 to 65535"),
        ({"log_level_http": "foo"}, "--log-level-http: found 'foo'; expected one of critical"),
        ({"preferred_sampling_params": {"top_p": "x"}}, "--preferred-sampling-params.top_p: found 'x'"),
        ({"preferred_sampling_params": {"novelty": 1}}, "--preferred-sampling-params.novelty: unknown field"),
        ({"preferred_sampling_params": {"n": 2}}, "--preferred-sampling-params.n: SGLang reads it in a request"),
        ({"preferred_sampling_params": [1]}, "--preferred-sampling-params: found [1]; expected an object"),
        ({"preferred_sampling_params": '{"top_p": 2}'}, "--preferred-sampling-params.top_p: found 2"),
        ({"preferred_sampling_params": "{"}, "--preferred-sampling-params: not valid JSON"),
        ({"default_chat_template_kwargs": {"thinking": "x"}}, "--default-chat-template-kwargs.thinking: found 'x'"),
    ],
)
def test_a_wrong_value_is_named(given: dict[str, Any], message: str, unset: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        combinations.check_combinations(unset | given)


@pytest.mark.parametrize(
    ("name", "taken", "refused"),
    [
        ("dynamic_batch_tokenizer_batch_timeout", (0, 1e8), (-0.1, 1e9)),
        ("gc_warning_threshold_secs", (0, 1e8), (-0.1, 1e9)),
        ("log_level", ("error", "DEBUG"), ("trace",)),
        ("log_level_http", ("error", "trace"), ("notset",)),
        ("mem_fraction_static", (0.01, 1), (0, 1.01)),
        ("port", (0, 65535), (65536,)),
        ("schedule_conservativeness", (0, 1e30), (-0.1, 1e31)),
        ("soft_watchdog_timeout", (0.1, 1e8), (0, 1e9)),
        ("swa_full_tokens_ratio", (0.01, 1), (0, 1.01)),
        ("watchdog_timeout", (0.1, 1e8), (0, 1e9)),
    ],
)
def test_ends_of_values(name: str, taken: tuple[Any, ...], refused: tuple[Any, ...], unset: dict[str, Any]) -> None:
    """By numbers of their own: a range that is written wrongly also draws wrong examples."""
    for value in taken:
        combinations.check_combinations(unset | {name: value})
    for value in refused:
        with pytest.raises(ConfigError, match=re.escape(f"{flags.flag(name)}: found")):
            combinations.check_combinations(unset | {name: value})


def test_a_level_is_checked_before_sglang_sets_up_its_logs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolution, "is_our_checkpoint", lambda path: path == "ours")
    with pytest.raises(ConfigError, match="^--log-level: found 'loud'; expected one of critical, error"):
        resolution.prepare(refuse, ["--log-level=info", "--model", "ours", "--log-level", "loud"])
    assert resolution.prepare(lambda argv: argv, ["--log-level", "DEBUG", "--model", "ours"])
    with pytest.raises(AssertionError):
        resolution.prepare(refuse, ["--log-level", "loud", "--model", "other"])


def test_tracing_needs_its_packages(unset: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without them SGLang loads the model for minutes, and ends with a traceback."""
    traced = unset | {"enable_trace": True}
    monkeypatch.setattr(settings, "can_trace", lambda: False)
    with pytest.raises(ConfigError, match=r"--enable-trace: .* pip install 'sglang\[tracing\]==0.5.23'"):
        combinations.check_combinations(traced)
    monkeypatch.setattr(settings, "can_trace", lambda: True)
    combinations.check_combinations(traced)
    monkeypatch.setenv(combinations.PROTOCOL, "http/json")
    with pytest.raises(ConfigError, match="OTEL_EXPORTER_OTLP_TRACES_PROTOCOL=http/json: expected one of grpc"):
        combinations.check_combinations(traced)


# --- SGLang's own resolution --------------------------------------------------------------------------------------


MOST_CHOICES = 9
"""A flag with more choices is tried with its first two: parsers are names that SGLang looks up."""
TOGETHER_AT_MOST = 8
"""Flags of one command line; each takes 0.1 s to resolve."""


def command_lines(options: dict[str, list[argparse.Action]]) -> Iterator[list[str]]:
    """Command lines that hold each flag that works, with each of its values that this machine takes.

    Values of one flag are tried one by one, and several flags at once.
    """
    several: list[list[str]] = []
    target = choose("cpu")
    taken = {"dtype": target.dtypes, "kv_cache_dtype": target.kv_cache_dtypes}
    for name in rows(Works):
        actions = [action for action in options.get(name, ()) if flags.flag(name) in action.option_strings]
        if not actions or name in (*NEEDS_FILES, *NEEDS_MORE):
            continue
        row, more = flags.ROWS[name], TOGETHER.get(name, ())
        assert isinstance(row, Works)
        if type(actions[0]).__name__ in SWITCHES:
            several.append([flags.flag(name), *more])
        elif name in VALUES:
            several.append([flags.flag(name), *VALUES[name], *more])
        else:
            values = [value for value in taken.get(name, row.values) or () if value is not None]
            yield from (
                [flags.flag(name), str(value), *more]
                for value in (values if len(values) <= MOST_CHOICES else values[:2])
            )
    rest = [one for one in several if one[0] not in ALONE]
    yield from (one for one in several if one[0] in ALONE)
    for start in range(0, len(rest), TOGETHER_AT_MOST):
        yield [argument for one in rest[start : start + TOGETHER_AT_MOST] for argument in one]


def resolved(lines: list[list[str]], folder: Path) -> list[str | None]:
    """What each command line comes to, in a process with this package's plugins."""
    run = subprocess.run(
        [sys.executable, resolved_flags.__file__],
        input=json.dumps(lines),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    found: list[str | None] = json.loads(run.stdout.splitlines()[-1])
    return found


ASSERTED: dict[str, tuple[tuple[str, ...], str]] = {
    "garbage": (("--gc-threshold", "1", "2", "3", "4"), "it must contain 1 to 3 integers"),
    "eviction": (("--radix-eviction-policy", "tlru"), "--radix-eviction-policy tlru needs 'threshold'"),
    "key": (("--ssl-keyfile", "absent"), "--ssl-certfile"),
    "buckets": (("--prompt-tokens-buckets", "all"), "Unsupported --prompt-tokens-buckets rule type: 'all'"),
    "gpus": (("--gpu-id-step", "0"), "gpu_id_step must be positive"),
    "file": (("--config", "absent.yaml"), "absent.yaml"),
}
"""Flags that SGLang itself does not take, and what it says."""


def test_resolution(
    options: dict[str, list[argparse.Action]], tiny_checkpoints: Callable[[str], Path], tmp_path: Path
) -> None:
    """SGLang takes every flag that works; what it does not take is one error of this package, and no traceback."""
    tried = list(command_lines(options))
    model = ["--model-path", str(tiny_checkpoints("nvfp4-full"))]
    lines = tried + [list(argv) for argv, _ in ASSERTED.values()]
    found = resolved([[*model, *argv] for argv in lines], tmp_path)
    assert [(argv, error) for argv, error in zip(tried, found, strict=False) if error is not None] == []
    for (argv, message), error in zip(ASSERTED.values(), found[len(tried) :], strict=True):
        assert error is not None and error.startswith("ConfigError: SGLang does not take these arguments: "), argv
        assert message in error and error.endswith("correct or leave out the flag that this names"), error


def refuse(*_: Any) -> None:
    raise AssertionError


def test_an_error_without_a_text_says_where_it_was_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolution, "is_our_checkpoint", lambda path: path == "ours")
    with pytest.raises(ConfigError, match=r"AssertionError at .*test_flags.py:\d+: raise AssertionError"):
        resolution.prepare(refuse, ["--model-path", "ours"])
    with pytest.raises(ConfigError):
        resolution.prepare(refuse, ["--model-path=ours"])
    with pytest.raises(ConfigError):
        resolution.resolve(refuse, SimpleNamespace(model_path="ours"))


def test_other_models_keep_what_sglang_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolution, "is_our_checkpoint", lambda path: path == "ours")
    for argv in (["--model-path", "other"], ["--port", "1"], ["--model-path"]):
        with pytest.raises(AssertionError):
            resolution.prepare(refuse, argv)
    with pytest.raises(AssertionError):
        resolution.resolve(refuse, SimpleNamespace(model_path="other"))
