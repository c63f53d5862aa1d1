"""SGLang's arguments for our architecture: pre-flight, contradictions, defaults.

The pre-flight runs in the launcher as the first step of SGLang's argument resolution, before SGLang reads config.json
itself and before any worker starts: a damaged checkpoint or a flag that we do not implement ends the server with one
error.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from nvfp4_sgl import prompt_sizes, pushed_sums
from nvfp4_sgl.architectures import architectures, is_served
from nvfp4_sgl.checkpoint import overrides as config_overrides
from nvfp4_sgl.checkpoint.beside import check_beside
from nvfp4_sgl.checkpoint.inventory import Inventory
from nvfp4_sgl.checkpoint.verified import Verified, verify
from nvfp4_sgl.config import ARCHITECTURE, ModelConfig, read_config_json
from nvfp4_sgl.convert.at_load import converted_at_load
from nvfp4_sgl.convert.options import parse_at_load
from nvfp4_sgl.errors import ConfigError, UnsupportedError
from nvfp4_sgl.files import refuse_hub_cache, require_file, require_finished
from nvfp4_sgl.numa import parse_cpus
from nvfp4_sgl.ops.modes import ActivationMode
from nvfp4_sgl.serving import flags, start_log
from nvfp4_sgl.serving.drafts import checks
from nvfp4_sgl.serving.flags.combinations import check_combinations
from nvfp4_sgl.serving.flags.kernels import BACKEND
from nvfp4_sgl.serving.flags.row import OFF
from nvfp4_sgl.serving.http_port import held_port
from nvfp4_sgl.serving.sglang import settings
from nvfp4_sgl.serving.sglang.ledger import find
from nvfp4_sgl.serving.tls_files import check_tls_files
from nvfp4_sgl.sglang_defaults import CPU_SWA_RATIO
from nvfp4_sgl.synthetic.random_weights import verify_dummy
from nvfp4_sgl.targets import requirements
from nvfp4_sgl.targets.choose import choose, detect_target, mode_of
from nvfp4_sgl.targets.target import descriptor
from nvfp4_sgl.tracing.asked import is_traced
from nvfp4_sgl.weights.parallel import TensorParallel

logger = logging.getLogger(__name__)

DUMMY = "dummy"
"""``--load-format`` of random weights."""

CONVERT_AT_LOAD = "convert_at_load"
"""Override that has matrices quantised to NVFP4 while they are loaded (:mod:`nvfp4_sgl.convert.at_load`)."""

OVERRIDABLE = ("activation_mode", CONVERT_AT_LOAD)
"""Fields of config.json that ``--json-model-override-args`` may set; weights are loaded by the file's other fields.
Random weights follow those of :data:`nvfp4_sgl.checkpoint.overrides.SIZES`, too."""

GPU_DTYPE = "bfloat16"
"""What ``--dtype auto`` is on a GPU, whose kernels take nothing else."""

PARSERS = {"reasoning_parser": "deepseek-v4", "tool_call_parser": "deepseekv4"}
"""The output parsers that fit the encoder of our prompts. SGLang would derive ``auto`` from a chat template's text, and
choose the encoder by the name of the tool-call parser."""

OTHER_FRONT_ENDS = ("SGLANG_RUST_SERVER", "SGLANG_GRPC_PORT")
"""Environment variables of SGLang that select a front end which our middleware does not stand in front of."""

LAYOUTS = {"SGLANG_DSV4_KV_LAYOUT": "v4", "SGLANG_DSV4_COMPRESSED_KV_LAYOUT": "auto"}
"""Environment variables of SGLang that change how pages are laid out, with the values of our layout."""

KEYS = ("api_key", "admin_api_key", "ssl_keyfile_password")
"""Arguments that nobody is to read in the log or in ``/server_info``."""

CRASH_DIAGNOSTICS = ("SGLANG_PYSPY_DUMP_BEFORE_CRASH", "SGLANG_CUDA_COREDUMP_BEFORE_CRASH")
"""Environment variables: with either, SGLang waits from five seconds to more than a minute before a server of which a
process has died ends. They are off unless set."""

UNIFORM_EXPERTS = "SGLANG_SIMULATE_UNIFORM_EXPERTS"
"""Environment variable of SGLang that has routing by scores simulated (:mod:`nvfp4_sgl.model.uniform_experts`)."""
ROUND_ROBIN = "SGLANG_SIMULATE_ROUND_ROBIN_EXPERTS"
"""Environment variable of SGLang that deals tokens out to experts in turn."""

CPU_BINDING = "SGLANG_CPU_OMP_THREADS_BIND"
"""Environment variable: CPUs of each rank, groups separated by ``|``."""


def is_our_checkpoint(path: str | Path | None) -> bool:
    """Whether ``path`` is a directory whose config.json names our architecture."""
    if path is None or not (Path(path) / "config.json").is_file():
        return False
    try:
        return is_served(read_config_json(path).get("architectures"))
    except ConfigError:
        return False  # SGLang reports what it cannot parse


def preflight(server_args: Any) -> None:
    """Check flags and checkpoint before any worker starts; nothing happens for other architectures."""
    given = settings.given_arguments(server_args)
    if given["model_path"] is not None:
        refuse_hub_cache(Path(given["model_path"]), ConfigError)
        require_finished(Path(given["model_path"]), ConfigError)
        if (config := Path(given["model_path"]) / "config.json").exists():
            require_file(config, ConfigError, "use the config.json of the release")
    if not is_our_checkpoint(given["model_path"]):
        return
    start_log.leave_out_false_lines()
    overrides = parse_overrides(given["json_model_override_args"], given["load_format"])
    check_arguments(given)
    check_combinations(given)
    checks.check_flags(given)
    check_keys(given)
    check_simulation()
    check_activation_mode(read_config_json(given["model_path"]), overrides)
    verified = served(given["model_path"], given["load_format"], overrides)
    check_target(given, {**verified.raw, **overrides}, verified.config, verified.inventory)
    checks.check_draft(given, verified, detect_target(), overrides)
    checks.prepare_environment(given)
    check_files_beside(given, verified.config.vocab_size)
    _verified_at_start.append(verified)
    bind_threads(given["tp_size"])
    for line in flags.without_effect(given, settings.unset_arguments()):
        logger.warning(line)
    for name in CRASH_DIAGNOSTICS:
        os.environ.setdefault(name, "0")
    settings.redact_launch_command(server_args, [given[name] for name in KEYS if given[name]])
    declared: dict[str, Any] = dict(PARSERS)
    if descriptor(detect_target()).on_gpu and given["dtype"] == "auto":
        # SGLang would take float16 where config.json has no torch_dtype, or float32.
        declared["dtype"] = GPU_DTYPE
    # The count of cached tokens is there in any case; this only lets answers say it.
    settings.declare(server_args, BACKEND, enable_cache_report=True, **declared, **checks.declared(given, verified))


def check_files_beside(given: Mapping[str, Any], vocab_size: int) -> None:
    """Refuse damaged files beside the weights; the tokenizer may be elsewhere, or not be needed."""
    elsewhere = given["tokenizer_path"]
    check_beside(Path(given["model_path"]), vocab_size, needs_tokenizer=not (elsewhere or given["skip_tokenizer_init"]))
    if elsewhere and Path(elsewhere).is_dir():
        check_beside(Path(elsewhere), vocab_size)


def check_arguments(given: Mapping[str, Any]) -> None:
    """Refuse arguments that contradict the checkpoint or select what is not implemented."""
    flags.check(given)
    backend = settings.given_prefill_graphs(given["cuda_graph_config"])
    if backend not in OFF:
        raise UnsupportedError(
            f"--cuda-graph-config: prefill backend {backend}: not implemented for {ARCHITECTURE} by this package;"
            " leave it out"
        )
    prompt_sizes.check_asked(on_gpu=descriptor(detect_target()).on_gpu)
    pushed_sums.check_asked(
        target=detect_target(),
        ranks=given["tp_size"],
        custom_all_reduce=not given["disable_custom_all_reduce"],
        traces=is_traced(),
    )
    for name in OTHER_FRONT_ENDS:
        if os.environ.get(name, "0").lower() not in ("", "0", "false"):
            raise UnsupportedError(f"{name}: not implemented for {ARCHITECTURE} by this package; unset it")
    for name, ours in LAYOUTS.items():
        found = os.environ.get(name, ours)
        if found.lower() != ours:
            raise UnsupportedError(
                f"{name}={found}: expected {ours}, the layout of pages that this package reads; unset it"
            )


def check_keys(given: Mapping[str, Any]) -> None:
    """Refuse keys that no HTTP header can hold, and an administrative key that every user has."""
    for name in ("api_key", "admin_api_key"):
        key = given[name]
        if key is not None and (not key or not key.isascii() or not key.isprintable() or " " in key):
            raise ConfigError(f"{flags.flag(name)}: expected printable ASCII characters without a space")
    if given["admin_api_key"] is not None and given["admin_api_key"] == given["api_key"]:
        raise ConfigError("--admin-api-key: the same as --api-key, which every user has; choose another")


def launch_server(original: Callable[..., Any], server_args: Any, *args: Any, **kwargs: Any) -> Any:
    """Hook around SGLang's start of a server, not of an engine without one: take the port before anything else."""
    given = settings.given_arguments(server_args)
    if not is_our_checkpoint(given["model_path"]):
        return original(server_args, *args, **kwargs)
    check_tls_files(*(given[f"ssl_{name}"] for name in ("certfile", "keyfile", "ca_certs", "keyfile_password")))
    with held_port(given["host"], given["port"]):
        return original(server_args, *args, **kwargs)


def redacted(original: Callable[[Any], dict[str, Any]], server_args: Any) -> dict[str, Any]:
    """Hook around what SGLang prints of its arguments: keys are left out."""
    resolved = original(server_args)
    return {**resolved, **{name: settings.REDACTED for name in KEYS if resolved.get(name)}}


def parse_overrides(text: str | None, load_format: str | None = None) -> dict[str, Any]:
    """``--json-model-override-args`` as a dictionary of fields that can be overridden with ``load_format``."""
    try:
        overrides = json.loads(text or "{}")
    except json.JSONDecodeError as error:
        raise ConfigError(f"--json-model-override-args: not valid JSON ({error})") from error
    if not isinstance(overrides, dict):
        raise ConfigError(f"--json-model-override-args: expected a JSON object, found {text}")
    allowed = OVERRIDABLE + (config_overrides.SIZES if load_format == DUMMY else ())
    for field in overrides:
        if field not in allowed:
            remedy = "change config.json instead"
            if field in config_overrides.SIZES:
                remedy = "it is the checkpoint's; random weights of other sizes come with --load-format dummy"
            raise ConfigError(
                f"--json-model-override-args: field '{field}' cannot be overridden, only {', '.join(allowed)}; {remedy}"
            )
    return overrides


def served(path: str | Path, load_format: str | None, overrides: Mapping[str, Any]) -> Verified:
    """The model served from ``path``: its checkpoint, converted if ``overrides`` say so, or random weights by them."""
    classes = overrides.get(CONVERT_AT_LOAD)
    if load_format != DUMMY:
        return verify(path) if classes is None else converted_at_load(verify(path), parse_at_load(classes))
    if classes is not None:
        raise ConfigError(f"{CONVERT_AT_LOAD}: random weights are drawn in the storage they have; leave it out")
    return verify_dummy(path, {name: value for name, value in overrides.items() if name not in OVERRIDABLE})


_verified_at_start: list[Verified] = []
"""What :func:`preflight` has passed in this process; the last one is served."""


def serves_ours() -> bool:
    """Whether this process has passed arguments for our architecture."""
    return bool(_verified_at_start)


def verified_at_start() -> Verified:
    """The files served, as they were when the server started; in the launcher's process, which is the front end's.

    Raises:
        UnsupportedError: another process resolved the arguments.
    """
    if not _verified_at_start:
        raise UnsupportedError("update of weights: expected the process that launched the server; restart it instead")
    return _verified_at_start[-1]


def resolved_overrides() -> dict[str, Any]:
    """The object of ``--json-model-override-args``, in any process of the server."""
    return parse_overrides(settings.resolved("json_model_override_args"), settings.resolved("load_format"))


def served_here() -> Verified:
    """:func:`served` by this process's arguments."""
    return served(settings.model_path(), settings.resolved("load_format"), resolved_overrides())


def complete_overrides(path: str | Path, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Overrides as SGLang's own config must see them: with what follows from them."""
    return config_overrides.completed(read_config_json(path), overrides)


def check_activation_mode(raw: Mapping[str, Any], overrides: Mapping[str, Any]) -> None:
    """Refuse an unknown ``activation_mode``."""
    mode, known = {**raw, **overrides}.get("activation_mode"), [mode.value for mode in ActivationMode]
    if mode is not None and mode not in known:
        where = "--json-model-override-args" if "activation_mode" in overrides else "config.json"
        raise ConfigError(f"{where}: activation_mode {mode!r}: expected one of {', '.join(known)}")


def check_simulation() -> None:
    """Refuse SGLang's other simulation of routing."""
    if settings.environment_flag(ROUND_ROBIN):
        raise UnsupportedError(
            f"{ROUND_ROBIN}: not implemented for {ARCHITECTURE} by this package; unset it, or use {UNIFORM_EXPERTS}=1"
        )


def check_target(given: Mapping[str, Any], raw: Mapping[str, Any], config: ModelConfig, inventory: Inventory) -> None:
    """Refuse a machine, a ``--device`` or an option that no target has, and a model that this one does not run."""

    if os.environ.get("SGLANG_USE_CPU_ENGINE", "0") == "1":
        raise UnsupportedError("SGLANG_USE_CPU_ENGINE=1: SGLang's compiled CPU kernels are not used; unset it")
    target = detect_target()
    expected = "cuda" if descriptor(target).on_gpu else "cpu"
    if given["device"] not in (None, expected):
        raise UnsupportedError(f"--device {given['device']}: this machine's target is {target}; leave the flag out")
    choice = choose(target, mode_of(target, raw.get("activation_mode")))
    options = {"dtype": choice.dtypes, "kv_cache_dtype": choice.kv_cache_dtypes}
    for name, allowed in options.items():
        flags.check_value(name, given[name], allowed, f" on {target}")
    TensorParallel(size=given["tp_size"]).check(config)
    requirements.check_target(
        target, config, given["tp_size"], inventory.storage, choice.mode, given["context_length"] or None
    )


def split_cpus(cpus: Sequence[int], ranks: int) -> str:
    """``cpus`` in equal groups, one a rank ("0,1|2,3"); shared round robin where there are fewer CPUs than ranks."""
    share = max(1, len(cpus) // ranks)
    groups = [[cpus[(rank * share + n) % len(cpus)] for n in range(share)] for rank in range(ranks)]
    return "|".join(",".join(map(str, group)) for group in groups)


def bind_threads(tp_size: int) -> None:
    """Give each CPU rank its cores by ``SGLANG_CPU_OMP_THREADS_BIND``: SGLang would demand a NUMA node for each."""
    if not descriptor(detect_target()).on_gpu and tp_size > 1 and not os.environ.get(CPU_BINDING):
        os.environ[CPU_BINDING] = split_cpus(sorted(os.sched_getaffinity(0)), tp_size)


def use_bound_cpus(rank: int) -> None:
    """Restrict this process to its group of :data:`CPU_BINDING`; SGLang itself binds only with its CPU kernels.

    A rank with a GPU is never restricted, whatever the environment says of CPU kernels.
    """
    groups = os.environ.get(CPU_BINDING, "").split("|")
    if groups == [""] or descriptor(detect_target()).on_gpu:
        return
    cpus = parse_cpus(groups[rank])
    os.sched_setaffinity(0, cpus)
    torch.set_num_threads(len(cpus))


def defaults(server_args: Any, hf_config: Any) -> dict[str, Any]:
    """Defaults of SGLang's arguments for our architecture; its own for DeepSeek-V4 were declared before."""
    if getattr(hf_config, "model_type", None) == "deepseek_v41" or not is_our_checkpoint(server_args.model_path):
        raise UnsupportedError(
            f"--model-path {server_args.model_path}: expected a local directory with a DeepSeek-V4 checkpoint in the"
            " original layout; download it first (hf download), or set NVFP4_SGL_DISABLE=1 for SGLang's own model"
        )
    given = settings.given_arguments(server_args)
    declared: dict[str, Any] = {
        "attention_backend": BACKEND,
        "moe_runner_backend": "auto",
        "sampling_backend": "pytorch",
    }
    if settings.resolving(server_args).device != "cpu" and given["kv_cache_dtype"] == "auto":
        declared["kv_cache_dtype"] = "fp8_e4m3"
    if settings.resolving(server_args).device == "cpu" and given["kv_cache_dtype"] == "auto":
        # SGLang knows two pool formats for this model; this one stands for exact rows (see kv_pool.row_dtype).
        declared["kv_cache_dtype"] = "bfloat16"
    if settings.resolving(server_args).device == "cpu" and given["swa_full_tokens_ratio"] is None:
        declared["swa_full_tokens_ratio"] = CPU_SWA_RATIO
    return declared


def register() -> None:
    """Hook :func:`preflight` and :func:`defaults` into SGLang's argument resolution."""
    find("add_attention_backend_choices")([BACKEND])

    @find("register_resolution_hook")("handle_deprecated_dp_attention")
    def nvfp4_sgl_preflight(server_args: Any, previous: Callable[[Any], None]) -> None:
        preflight(server_args)
        previous(server_args)

    for architecture in architectures():
        find("register_model_override")(architecture.name)(defaults)
