"""Refuses a run of ``launch/bench_full`` that this machine cannot end, before anything starts; its plan in words."""

from __future__ import annotations

import argparse
import functools
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

from benchmarks.full_size_plan import (
    ENGINES,
    Start,
    draft_of,
    draft_weights_of,
    given_flags,
    model_of,
    rows_of_a_round,
    server_flags,
    starts,
)
from benchmarks.released import MODELS, DraftWeights, config_of
from nvfp4_sgl import prompt_sizes, pushed_sums
from nvfp4_sgl.checkpoint.drafts import DraftKind
from nvfp4_sgl.checkpoint.inventory import Inventory
from nvfp4_sgl.checkpoint.names import Role, tensor_specs
from nvfp4_sgl.checkpoint.storage import Storage
from nvfp4_sgl.checkpoint.summary import CheckpointSummary
from nvfp4_sgl.config import ModelConfig
from nvfp4_sgl.errors import Nvfp4SglError
from nvfp4_sgl.memory.forecast import GPU_RUNTIME_BYTES, Forecast, forecast, gb
from nvfp4_sgl.memory.setting import Setting
from nvfp4_sgl.sglang_defaults import CHUNK, PACKED_SWA_RATIO
from nvfp4_sgl.synthetic.random_weights import RandomWeights
from nvfp4_sgl.synthetic.tiny_config import TinyDraft
from nvfp4_sgl.targets.requirements import check_draft, check_target

CARDS = {"H200": 139 << 30, "H100 80GB": 78 << 30}
"""Bytes that are free on a card before a server starts; both have more than the 141 and 80 GB they are sold as."""
HOST_BYTES_OF_A_RANK = 6 << 30
"""Estimated: host memory of a rank's process, with torch, CUDA and what compiles kernels. Weights are drawn on GPUs."""
NO_PROMPT_GRAPHS = {"--disable-cuda-graph", "--disable-prefill-cuda-graph"}
"""Flags with which a server captures no prompts."""
DISK_BYTES = 4 << 30
"""Estimated: logs, traces of all ranks, and compiled kernels. Dummy weights have no files."""


@dataclass(frozen=True)
class Machine:
    """The machine of a run.

    Attributes:
        name: of its cards. target: by name. gpus: how many.
        free: bytes on the GPU with the least. host, disk: bytes that are free.
    """

    name: str
    target: str
    gpus: int
    free: int
    host: int
    disk: int

    @classmethod
    def here(cls, output: Path, ranks: int) -> Machine:
        """This machine; of its GPUs the first ``ranks``."""
        import torch

        from nvfp4_sgl.targets.choose import detect_target

        gpus = torch.cuda.device_count()
        free = min((torch.cuda.mem_get_info(gpu)[0] for gpu in range(min(gpus, ranks))), default=0)
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        host = int(lines["MemAvailable"].split()[0]) * 1024
        folder = next(path for path in [output, *output.resolve().parents] if path.exists())
        return cls(torch.cuda.get_device_name(), detect_target(), gpus, free, host, shutil.disk_usage(folder).free)


def assumed(arguments: argparse.Namespace, name: str) -> Machine:
    """A machine of as many of :data:`CARDS` as the run needs, which lacks nothing else."""
    enough = 1 << 60
    return Machine(name, "sm_90a", arguments.tp, CARDS[name], enough, enough)


def problems(arguments: argparse.Namespace, machine: Machine) -> Iterator[str]:
    """Reasons why ``machine`` cannot end this run, with the flag to change; none if it can be tried."""
    ranks = arguments.tp
    if machine.gpus < ranks:
        yield f"--tp {ranks}: expected {ranks} GPUs, found {machine.gpus}; use a machine with more, or a smaller --tp"
    if machine.host < (needed := ranks * HOST_BYTES_OF_A_RANK):
        yield (
            f"host memory: expected {gb(needed).strip()} for {ranks} ranks, found {gb(machine.host).strip()} available;"
            " end other processes, or use a smaller --tp"
        )
    if machine.disk < DISK_BYTES:
        yield (
            f"--output {arguments.output}: expected {gb(DISK_BYTES).strip()} free for logs, traces and kernels, found"
            f" {gb(machine.disk).strip()}; name a folder on another disk"
        )
    try:
        for start in starts(arguments):
            yield from _memory_problems(arguments, start, machine)
    except Nvfp4SglError as error:
        yield str(error)


def _memory_problems(arguments: argparse.Namespace, start: Start, machine: Machine) -> Iterator[str]:
    where = f"{start.engine} for {start.most} requests on {machine.name}"
    if start.engine == "stock":
        least = _least_stored_bytes(arguments.model, arguments.layers) // arguments.tp + GPU_RUNTIME_BYTES
        if least > machine.free:
            yield f"{where}: stored weights and CUDA need {gb(least).strip()}, found {gb(machine.free).strip()} free"
        return
    found = forecast_of(arguments, start, machine.target, machine.free)
    if shortage := found.shortage():
        yield f"{where}: {shortage}"
        return
    needed = max(start.concurrency, default=0) * (arguments.prompt + arguments.tokens)
    if found.tokens is not None and found.tokens < needed:
        yield (
            f"{where}: {max(start.concurrency)} requests of {arguments.prompt} and {arguments.tokens} tokens need"
            f" {needed:,d} of a pool, found room for {found.tokens:,d}; use fewer requests at once, or a larger"
            " --mem-fraction-static by --flags"
        )


def forecast_of(arguments: argparse.Namespace, start: Start, target: str, free: int) -> Forecast:
    """Forecast of a rank of ours, by the flags that its server will have.

    Raises:
        ConfigError: the model cannot be split over so many ranks, no kernel of ``target`` takes a rank's sizes, or
            ``NVFP4_SGL_PROMPT_GRAPHS`` has a wrong value.
    """
    given = given_flags(server_flags(arguments, start)[0])
    most = given.get("--max-total-tokens")
    chunk = int(given.get("--chunked-prefill-size", CHUNK))
    captures = not NO_PROMPT_GRAPHS & given.keys()
    setting = Setting(
        arguments.tp,
        int(given["--max-running-requests"]),
        int(given["--context-length"]),
        chunk,
        dtype_bytes=2,
        row_bytes=None,
        swa_ratio=PACKED_SWA_RATIO,
        fraction=float(given["--mem-fraction-static"]),
        most_tokens=None if most is None else int(most),
        window_by_ratio=False,
        prompt_tokens=prompt_sizes.planned(chunk) if captures else 0,
        pushed_tokens=pushed_sums.planned_tokens(target=target, ranks=arguments.tp),
    )
    draft = draft_of(arguments)
    if start.drafts:
        kind = DraftKind.MTP if draft is TinyDraft.MTP else DraftKind.DSPARK
        setting = replace(setting, draft=kind, round_tokens=rows_of_a_round(arguments))
    return _forecast(_Ours.of(arguments), target, setting).with_free(free)


@dataclass(frozen=True)
class _Ours:
    """Everything that the weights of our server depend on."""

    model: str
    layers: int | None
    draft: TinyDraft
    draft_weights: DraftWeights

    @classmethod
    def of(cls, arguments: argparse.Namespace) -> _Ours:
        return cls(arguments.model, arguments.layers, draft_of(arguments), draft_weights_of(arguments))

    def weights(self) -> RandomWeights:
        """The weights, without values."""
        raw = config_of(MODELS[self.model], ENGINES["ours"], self.layers, self.draft, self.draft_weights)
        inventory = _AllNvfp4(Path(MODELS[self.model].name), {})
        return RandomWeights(raw, ModelConfig.from_dict(raw), inventory, CheckpointSummary(inventory.directory))


@functools.cache
def _forecast(ours: _Ours, target: str, setting: Setting) -> Forecast:
    """Forecast a rank's memory on any device, once for each setting: to list Pro's tensors takes seconds."""
    weights = ours.weights()
    setting.owner.check(weights.config)
    check_target(target, weights.config, setting.ranks, weights.inventory.storage, longest=setting.context)
    if setting.draft is not None and (draft := weights.draft()) is not None:
        check_draft(target, draft, weights.config)
    return forecast(weights, target, setting, None)


class _AllNvfp4(Inventory):
    """The tensors of full NVFP4, without a list of them."""

    def storage(self, name: str) -> Storage:
        return Storage.NVFP4


@functools.cache
def _least_stored_bytes(model: str, layers: int | None) -> int:
    """Bytes of the matrices of the release that stock serves, experts in MXFP4 and none smaller than FP8 else."""
    specs = tensor_specs(ModelConfig.from_dict(config_of(MODELS[model], ENGINES["stock"], layers))).values()
    experts = sum(prod(spec.shape) for spec in specs if spec.role is Role.EXPERT_LINEAR)
    others = sum(prod(spec.shape) for spec in specs if spec.role is Role.LINEAR)
    return experts * 17 // 32 + others


def _draft_words(arguments: argparse.Namespace) -> str:
    """Kind of our server's draft, and how many of its matrices are stored as what."""
    draft = _Ours.of(arguments).weights().draft()
    assert draft is not None, "every configuration of a run has one"
    return f"ours has {draft.kind.words}, its matrices {draft.stored}; {gb(draft.nbytes).strip()} stored"


def plan_lines(arguments: argparse.Namespace) -> Iterator[str]:
    """The whole plan: starts with flags, environment and measurements, then the forecast for each of :data:`CARDS`."""
    model = model_of(arguments)
    layers = model.layers if arguments.layers is None else arguments.layers
    yield f"{model.name}, {layers} layers, random weights, {arguments.tp} GPUs; results in {arguments.output}"
    if arguments.drafts and "ours" in arguments.servers:
        yield f"--draft-weights {arguments.draft_weights}: {_draft_words(arguments)}"
    seen: dict[str, list[str]] = {engine: [] for engine in ENGINES}
    number = 0
    for start in starts(arguments):
        flags, values = server_flags(arguments, start)
        names = start.left(seen[start.engine])
        if not names:
            continue  # a run leaves it out, too
        number += 1
        seen[start.engine] += names
        yield f"\nstart {number}: {start.engine}, laid out for {start.most} requests"
        yield f"  environment  {' '.join(f'{name}={value}' for name, value in sorted(values.items()))}"
        yield f"  server       python -m sglang.launch_server --model-path {start.engine}/model {' '.join(flags)}"
        yield f"  measures     {', '.join(names)}"
    for name in CARDS:
        machine = assumed(arguments, name)
        last = [start for start in starts(arguments) if start.engine == "ours"][-1:]
        whose = "ours" if last else "stock, its stored weights alone"
        yield f"\nforecast of a rank of {whose}, {arguments.tp} x {name}, {gb(machine.free).strip()} free"
        found = list(problems(arguments, machine))
        yield from (f"  does not fit: {problem}" for problem in found)
        if not found and not last:
            yield "  fits"
        elif not found:
            yield from (f"  {line}" for line in forecast_of(arguments, last[0], "sm_90a", machine.free).lines())
