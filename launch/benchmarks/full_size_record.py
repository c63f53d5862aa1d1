"""Writes the figures of ``launch/bench_full --record FILE``: ours beside stock's."""

from __future__ import annotations

import subprocess
from argparse import Namespace
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.figures import write
from benchmarks.full_size_plan import model_of

ROOT = Path(__file__).resolve().parents[2]
PEER = "stock SGLang (FP8 + MXFP4, Marlin)"
CLIENT = {
    "mean_tpot_ms": ("time per output token, mean", "ms"),
    "median_tpot_ms": ("time per output token, median", "ms"),
    "median_ttft_ms": ("time to first token, median", "ms"),
    "output_throughput": ("output tokens per second", "tokens/s"),
}
"""Metric and unit of what SGLang's client says."""
LONG = ("median_ttft_ms",)
"""What counts of the long prompt, whose answer has four tokens."""

MEMORY = {
    "host memory": {
        "RSS of ranks": "host memory of all ranks while loading, RSS",
        "PSS of ranks": "host memory of all ranks while loading, PSS",
    },
    "GPU memory": {
        "weights": "GPU memory of a rank's weights",
        "weights, forecast": "GPU memory of a rank's weights, forecast",
        "in use": "GPU memory in use once ready",
        "in use, forecast": "GPU memory in use once ready, forecast",
    },
}
"""Metrics of memory, by measurement and field."""


def record(file: Path, arguments: Namespace, found: Mapping[str, Mapping[str, Any]], run: dict[str, Any]) -> None:
    """Write what the run of ``arguments`` found so far; nothing before its first figure of ours.

    Args:
        found: what each measurement found, by server and name; servers that this run does not measure are left out.
        run: what holds for all figures: :func:`described`.
    """
    stock = found.get("stock", {}) if "stock" in arguments.servers else {}
    ours = dict(figures(found.get("ours", {}), arguments))
    peers = dict(figures(stock, arguments))
    lines = []
    for key, line in ours.items():
        peer = {"peer": PEER, "peer_value": peers[key]["value"]} if key in peers else {}
        lines.append(line | peer)
    if lines:
        write(file, run, lines)


def figures(found: Mapping[str, Any], arguments: Namespace) -> Iterator[tuple[tuple[object, ...], dict[str, Any]]]:
    """(what to match with the other server's, fields of a figure) of one server."""
    for name, value in found.items():
        kind, _, count = name.rpartition(" ")
        if kind == "at":
            names, conditions = tuple(CLIENT), conditions_of(int(count), arguments.prompt, arguments.tokens)
        elif kind == "prompt of":
            names, conditions = LONG, conditions_of(1, int(count), None)
        elif kind == "steady at" and value is not None:
            conditions = conditions_of(int(count), arguments.prompt, arguments.tokens)
            yield line("decode step, steady", "ms", value, conditions)
            continue
        else:
            yield from of_a_start(name, value)
            continue
        for field in names:
            yield line(*CLIENT[field], value[field], conditions)


def of_a_start(name: str, value: Any) -> Iterator[tuple[tuple[object, ...], dict[str, Any]]]:
    """Figures of a server that is ready: seconds, and GB of those sizes that were found."""
    if name == "ready after":
        yield line("ready after the process began", "s", value, {})
    elif name == "start":
        for metric, seconds in (
            ("ready after weights", value["ready after weights"]),
            ("weights loaded in", value["stages"].get("weights")),
        ):
            if seconds is not None:
                yield line(metric, "s", seconds, {})
    elif name in MEMORY:
        for field, metric in MEMORY[name].items():
            if value.get(field) is not None:
                yield line(metric, "GB", value[field], {})


def line(metric: str, unit: str, value: float, conditions: dict[str, int]) -> tuple[tuple[object, ...], dict[str, Any]]:
    return (metric, *conditions.items()), {"metric": metric, "unit": unit, "value": value, **conditions}


def conditions_of(requests: int, prompt: int, output: int | None) -> dict[str, int]:
    return {"requests": requests, "prompt": prompt} | ({} if output is None else {"output": output})


def described(arguments: Namespace, command: list[str]) -> dict[str, Any]:
    """The conditions of all figures of a run: model, machine, code and command."""
    import torch

    released = model_of(arguments)
    model, layers = f"{released.name}, random weights", arguments.layers or released.layers
    run = {
        "case": f"{arguments.model}_tp{arguments.tp}",
        "model": model if layers == released.layers else f"{model}, {layers} layers",
        "machine": torch.cuda.get_device_name(),
        "cards": arguments.tp,
        "tp": arguments.tp,
        "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%MZ"),
        "code": code_version(),
        "source": " ".join(["launch/bench_full", *command]),
    }
    chosen = [arguments.flags, "top-p 0.95" if arguments.sampling == "top-p" else ""]
    setting = ", ".join(filter(None, [*chosen, "radix cache" if arguments.radix_cache else ""]))
    return run | ({"setting": setting} if setting else {})


def code_version() -> str | None:
    """The commit, with ``+ changes`` where files differ from it; None outside of a repository."""
    git = ["git", "-C", str(ROOT)]
    commit = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    if commit.returncode:
        return None
    changed = subprocess.run([*git, "status", "--porcelain", "--untracked-files=no"], capture_output=True, text=True)
    return commit.stdout.strip() + (" + changes" if changed.stdout.strip() else "")
