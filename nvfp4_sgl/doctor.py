"""``nvfp4-sgl doctor``: report what would run here, or elsewhere by the flags of a plan, and what prevents it.

Collects versions against the pins of this distribution, the device, the implementation of every op on it, the modes,
and whether SGLang will find the plugin. Nothing is started and nothing is changed.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, entry_points, requires, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from packaging.requirements import Requirement

from nvfp4_sgl import __version__, numa, prompt_sizes, pushed_sums
from nvfp4_sgl.arguments import add_checkpoint, add_json, named_here, print_json
from nvfp4_sgl.checkpoint.beside import check_beside
from nvfp4_sgl.checkpoint.drafts import DRAFTS
from nvfp4_sgl.checkpoint.names import MTP_PREFIX
from nvfp4_sgl.checkpoint.verified import holds_weights, verify
from nvfp4_sgl.config import require_checkpoint
from nvfp4_sgl.draft_arguments import DraftFlags
from nvfp4_sgl.errors import ConfigError, Nvfp4SglError
from nvfp4_sgl.memory import plan as plans
from nvfp4_sgl.memory.plan import ServerFlags
from nvfp4_sgl.plugin import is_disabled
from nvfp4_sgl.process_exit import DISABLE_VARIABLE
from nvfp4_sgl.serving.drafts import checks
from nvfp4_sgl.synthetic.random_weights import verify_dummy
from nvfp4_sgl.targets import choose
from nvfp4_sgl.targets.requirements import check_target
from nvfp4_sgl.targets.target import descriptor
from nvfp4_sgl.terminal import fitted
from nvfp4_sgl.tracing.asked import is_traced
from nvfp4_sgl.weights.parallel import TensorParallel

if TYPE_CHECKING:
    from nvfp4_sgl.checkpoint.drafts import Draft
    from nvfp4_sgl.checkpoint.verified import Verified
    from nvfp4_sgl.ops.modes import ActivationMode
    from nvfp4_sgl.targets.choose import Choice

DISTRIBUTION = "nvfp4-sgl"
PLUGIN_NAME = "nvfp4_sgl"
PLATFORM_GROUP = "sglang.srt.platforms"
PLUGIN_GROUP = "sglang.srt.plugins"
KV_ROW_MODES = {
    "exact": "rows in the model's dtype (--kv-cache-dtype auto, the default)",
    "packed": "SGLang's 584-byte entries (--kv-cache-dtype fp8_e4m3)",
}

FITS = {True: "yes", False: "no", None: "unknown: give --gpu-memory"}


@dataclass(frozen=True)
class Pin:
    """One distribution that this package holds at an exact version; ``found`` is ``None`` where it is absent."""

    name: str
    expected: str
    found: str | None
    ok: bool


@dataclass(frozen=True)
class EntryPointState:
    """Whether SGLang sees one entry point of ours and will act on it; ``reason`` says why not."""

    group: str
    visible: bool
    enabled: bool
    reason: str


@dataclass
class Report:
    """All findings; ``problems`` is empty exactly where a server would start.

    Attributes:
        target: this machine's. described_target: whose boundaries, modes and note are told: the plan's, or else this
            machine's.
        not_checked: what of the checkpoint was not checked, and the command that checks it; empty without weights.
        draft: what the checkpoint bundles for drafting, and the flag that uses it; empty if nothing.
        rank_sums: the way in which sums over tensor-parallel ranks are formed, and why; empty without a checkpoint,
            and where a problem stands against it.
    """

    nvfp4_sgl: str = __version__
    location: str = str(Path(__file__).resolve().parent)
    python: str = platform.python_version()
    pins: list[Pin] = field(default_factory=list)
    devices: list[str] = field(default_factory=list)
    numa: list[str] = field(default_factory=list)
    target: str | None = None
    described_target: str | None = None
    boundaries: dict[str, str] = field(default_factory=dict)
    note: str = ""
    activation_mode: str = ""
    activation_modes: list[str] = field(default_factory=list)
    kv_row_modes: dict[str, str] = field(default_factory=dict)
    entry_points: list[EntryPointState] = field(default_factory=list)
    checkpoint: dict[str, Any] | None = None
    checkpoint_table: str = ""
    not_checked: str = ""
    draft: str = ""
    rank_sums: str = ""
    memory: dict[str, Any] | None = None
    memory_lines: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``nvfp4-sgl doctor``."""
    add_checkpoint(parser, optional=True, more=" to verify as well, or one with config.json alone")
    add_json(parser)
    plans.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Print the report; 0 if a server would start here, or as planned, and 1 if something stands in its way.

    A DIR that is no checkpoint raises, and so does a wrong value of ``NVFP4_SGL_PROMPT_GRAPHS`` or
    ``NVFP4_SGL_PUSHED_SUMS``.
    """
    prompt_sizes.asked()
    pushed_sums.asked()
    plan = plans.from_arguments(args)
    if args.directory is None and (flags := plan.given()):
        raise ConfigError(
            f"{', '.join(flags)}: expected DIR, too, a checkpoint or a folder with config.json; add it, or leave the"
            " flags out"
        )
    if args.directory is not None:
        require_checkpoint(args.directory)
    report = examine(args.directory, plan)
    report.problems = [named_here(problem) for problem in report.problems]
    if args.json:
        print_json(asdict(report))
    else:
        print(fitted(render(report)))
    return 1 if report.problems else 0


def examine(directory: Path | None = None, plan: ServerFlags | None = None) -> Report:
    """Examine this process's surroundings, and the checkpoint in ``directory`` if one is given.

    The memory of a rank is forecast for the server of ``plan``, one with default flags here unless given.

    Findings that would stop a server are put into ``problems``; only defects raise.
    """
    report = Report(kv_row_modes=dict(KV_ROW_MODES))
    try:
        report.pins = compare_pins(requires(DISTRIBUTION) or [])
    except PackageNotFoundError:
        report.problems.append(
            f"distribution {DISTRIBUTION} is not installed, so SGLang cannot find the plugin; install this checkout"
            " (launch/environment, or `pip install -e . -c constraints.txt`)"
        )
    for pin in report.pins:
        if not pin.ok:
            found = pin.found or "nothing"
            report.problems.append(
                f"{pin.name}: expected {pin.expected}, found {found}; pip install {pin.name}=={pin.expected}"
            )
    report.entry_points = [entry_point_state(group) for group in (PLATFORM_GROUP, PLUGIN_GROUP)]
    for state in report.entry_points:
        if not state.enabled:
            report.problems.append(f"entry point {PLUGIN_NAME} of {state.group}: {state.reason}")
    if any(pin.name == "torch" and pin.found is None for pin in report.pins):
        return report
    plan = plan or ServerFlags()
    examine_target(report, plan.target)
    if directory is not None:
        examine_checkpoint(report, directory, plan)
    return report


def compare_pins(requirements: Iterable[str]) -> list[Pin]:
    """The exact (``==``) requirements among ``requirements`` (PEP 508 strings, extras left out) against what is
    installed. A local version label (``+cu130``) is no mismatch."""
    pins = []
    for text in requirements:
        requirement = Requirement(text)
        exact = [s.version for s in requirement.specifier if s.operator == "=="]
        if not exact or (requirement.marker is not None and not requirement.marker.evaluate({"extra": ""})):
            continue
        try:
            found = version(requirement.name)
        except PackageNotFoundError:
            found = None
        ok = found is not None and requirement.specifier.contains(found, prereleases=True)
        pins.append(Pin(requirement.name, exact[0], found, ok))
    return pins


def entry_point_state(group: str) -> EntryPointState:
    """Whether SGLang acts on our entry point of ``group`` under the switches in this process's environment."""
    visible = any(point.name == PLUGIN_NAME for point in entry_points(group=group))
    reason = ""
    selected = os.environ.get("SGLANG_PLATFORM", "")
    allowed = [name.strip() for name in os.environ.get("SGLANG_PLUGINS", "").split(",") if name.strip()]
    if not visible:
        reason = f"not visible; the distribution {DISTRIBUTION} is not installed in this environment"
    elif is_disabled():
        reason = f"switched off by {DISABLE_VARIABLE}={os.environ[DISABLE_VARIABLE]}"
    elif selected and selected != PLUGIN_NAME:
        reason = f"left out by SGLANG_PLATFORM={selected}"
    elif allowed and PLUGIN_NAME not in allowed:
        reason = f"left out by SGLANG_PLUGINS={','.join(allowed)}"
    return EntryPointState(group, visible, not reason, reason)


def examine_target(report: Report, planned: str | None = None) -> None:
    """Fill in devices, NUMA nodes, target, and boundaries and modes of the target ``planned``, or this machine's."""
    import torch

    addresses = {}
    for index in range(torch.cuda.device_count()):
        found: Any = torch.cuda.get_device_properties(index)
        place = f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"
        addresses[f"cuda:{index}"] = place
        report.devices.append(
            f"cuda:{index}: {found.name}, compute capability {found.major}.{found.minor},"
            f" {found.total_memory / 2**30:.0f} GiB"
        )
    report.numa = numa.describe(
        addresses,
        allowed=os.sched_getaffinity(0),
        has_numactl=shutil.which("numactl") is not None,
        environment=os.environ,
        sysfs=numa.SYSFS,
    )
    if not report.devices:
        report.devices.append(f"cpu: {platform.machine()}, {torch.get_num_threads()} threads")
    try:
        report.target = choose.detect_target()
    except Nvfp4SglError as error:
        if planned is None:
            report.problems.append(str(error))
    report.described_target = planned or report.target
    if report.described_target is None:
        return
    try:
        prompt_sizes.check_asked(on_gpu=descriptor(report.described_target).on_gpu)
    except ConfigError as error:
        report.problems.append(str(error))
    try:
        pushed_sums.check_target(report.described_target)
    except ConfigError as error:
        report.problems.append(str(error))
    fill_in(report, choose.choose(report.described_target))
    if descriptor(report.described_target).on_gpu:
        report.kv_row_modes = {"packed": "SGLang's 584-byte entries (the default)"}


def fill_in(report: Report, choice: Choice) -> None:
    """Fill in what ``choice`` says: a target in one mode."""
    report.note, report.boundaries = choice.note, choice.boundaries.names()
    report.activation_mode, report.activation_modes = choice.mode.value, [mode.value for mode in choice.modes]


def examine_checkpoint(report: Report, directory: Path, plan: ServerFlags) -> None:
    """Verify what is in ``directory``, a checkpoint or config.json alone; fill in its summary and its memory."""
    try:
        verified = verify(directory) if holds_weights(directory) else verify_dummy(directory)
        TensorParallel(size=plan.ranks).check(verified.config)
        check_beside(directory, verified.config.vocab_size, needs_tokenizer=holds_weights(directory))
    except Nvfp4SglError as error:
        report.problems.append(f"checkpoint: {error}")
        return
    summary = verified.summary
    weights = f"none here; counted by config.json, {summary.format}" if verified.is_dummy else verified.describe()
    report.checkpoint = {"directory": str(directory), "format": summary.format, "weights": weights}
    report.checkpoint_table = summary.table()
    draft = examine_draft(report, verified, plan)
    if not verified.is_dummy:
        is_bundled = any(name.startswith(MTP_PREFIX) for name in verified.inventory.entries)
        whose = ", the draft's included" if is_bundled else ""
        report.not_checked = f"values of tensors{whose}; nvfp4-sgl verify {directory} reads them"
    if chosen := plan.target or report.target:
        mode = None
        try:
            mode = choose.mode_of(chosen, verified.raw.get("activation_mode"))
            check_target(chosen, verified.config, plan.ranks, verified.inventory.storage, mode, plan.context)
        except Nvfp4SglError as error:
            report.problems.append(f"checkpoint: {error}")
        fill_in(report, choose.choose(chosen, mode))
        examine_sums(report, chosen, plan.ranks)
        examine_memory(report, verified, chosen, plan, mode, draft)


def examine_sums(report: Report, target: str, ranks: int) -> None:
    """Say how ``ranks`` ranks sum, and check that they can push their parts if the environment asks for it."""
    traces = is_traced()
    try:
        pushed_sums.check_asked(target=target, ranks=ranks, custom_all_reduce=True, traces=traces)
        report.rank_sums = pushed_sums.describe(target=target, ranks=ranks, traces=traces)
    except ConfigError as error:
        if str(error) not in report.problems:  # of a wrong target there is one already
            report.problems.append(str(error))


def examine_draft(report: Report, verified: Verified, plan: ServerFlags) -> Draft | None:
    """Say what is bundled for drafting, and check that ``plan`` can have it; the draft of a server of ``plan``."""
    given = DraftFlags(plan.algorithm, plan.steps, plan.block).given(verified)
    draft, chosen = None, plan.target or report.target
    try:
        draft = verified.draft()
        report.draft = "" if draft is None else draft.describe()
        checks.check_flags(given)
        if chosen:
            checks.check_draft(given, verified, chosen, {})
    except Nvfp4SglError as error:
        if (plan.algorithm, plan.steps, plan.block) == (None, None, None):
            report.draft = f"not usable: {error}"
        else:
            report.problems.append(f"draft: {error}")
    is_wanted = draft is not None and plan.algorithm is not None and draft.kind is DRAFTS[plan.algorithm]
    return draft if is_wanted else None


def examine_memory(
    report: Report,
    verified: Verified,
    target: str,
    plan: ServerFlags,
    mode: ActivationMode | None,
    draft: Draft | None = None,
) -> None:
    """Forecast the memory of a rank on ``target``.

    Raises:
        ConfigError: a flag of ``plan`` that the target or the model does not take.
    """
    from nvfp4_sgl.memory import forecast, free

    available = None
    if plan.gpu_memory is not None:
        available = int(plan.gpu_memory * 2**30)
    elif target == report.target:
        available = free.free_bytes(plan.ranks)
    found = forecast.forecast(verified, target, plan.setting(target, verified.config, draft), available, mode)
    shortage = found.shortage()
    report.memory, report.memory_lines = found.as_json() | {"fits": found.fits}, found.lines()
    if shortage is not None:
        report.problems.append(f"memory: {shortage}")


def render(report: Report) -> str:
    """The report as text for a person."""
    lines = [f"nvfp4-sgl {report.nvfp4_sgl} ({report.location}), Python {report.python}", "", "Versions"]
    for pin in report.pins:
        found = pin.found or "absent"
        lines.append(f"  {pin.name:<20} {found:<16} " + ("OK" if pin.ok else f"MISMATCH, expected {pin.expected}"))
    lines += ["", "Device", *(f"  {device}" for device in report.devices)]
    lines.append(f"  target               {report.target or 'unsupported'}")
    if report.numa:
        lines += ["", "NUMA", *(f"  {line}" for line in report.numa)]
    if report.boundaries:
        lines += ["", f"Boundaries on {report.described_target} in {report.activation_mode}"]
        lines += [f"  {name:<20} {where}" for name, where in report.boundaries.items()]
    if report.note:
        lines += [f"  NOTE: {report.note}"]
    lines += ["", "Modes", f"  activations          {', '.join(report.activation_modes)}"]
    lines += [f"  KV rows, {mode:<11} {text}" for mode, text in report.kv_row_modes.items()]
    lines += ["", "SGLang entry points"]
    lines += [f"  {s.group:<20} {'enabled' if s.enabled else s.reason}" for s in report.entry_points]
    if report.checkpoint is not None:
        lines += ["", f"Checkpoint {report.checkpoint['directory']}", f"weights: {report.checkpoint['weights']}"]
        lines += [report.checkpoint_table]
        lines += [f"not checked: {report.not_checked}"] if report.not_checked else []
        lines += [f"draft: {report.draft}"] if report.draft else []
        lines += [f"sums over ranks: {report.rank_sums}"] if report.rank_sums else []
    if report.memory is not None:
        lines += ["", f"Memory of a rank, --tp {report.memory['setting']['ranks']}, a forecast"]
        lines += [f"  {line}" for line in report.memory_lines]
        lines.append(f"  fits                {FITS[report.memory['fits']]}")
    lines += ["", *(f"PROBLEM: {problem}" for problem in report.problems)] if report.problems else ["", "No problems."]
    return "\n".join(lines)
