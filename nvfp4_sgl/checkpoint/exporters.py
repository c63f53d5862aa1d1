"""The words of ``quantization_config`` and ``hf_quant_config.json``, understood or refused.

What exporters write about matrices becomes a list of :class:`Statement`: a field, the matrices that it speaks of, and
what it says they are stored as. Words that are not known here could mean anything (a rotation, a pre-scale), so they
are refused by name. Source: specification §8.2; ModelOpt's export for DeepSeek-V4; compressed-tensors'
QuantizationConfig.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from nvfp4_sgl.checkpoint.decoders import Writer
from nvfp4_sgl.checkpoint.names import MTP_PREFIX, Role, TensorSpec
from nvfp4_sgl.checkpoint.patterns import Names, Targets, Wildcards
from nvfp4_sgl.checkpoint.transformers_names import PREFIX
from nvfp4_sgl.errors import ConfigError
from nvfp4_sgl.files import MAX_NAME, shown
from nvfp4_sgl.formats import blocks

NVFP4, MXFP4, FP8, PLAIN = "NVFP4", "MXFP4", "FP8", ""
"""Schemes, as :attr:`.decoders.Decoder.scheme`; :data:`PLAIN` is no quantisation."""
ALL = frozenset({NVFP4, MXFP4, FP8, PLAIN})

COMPRESSED = "compressed-tensors"
QUANT_METHODS = ("modelopt", "modelopt_fp4", "modelopt_mixed", "fp8")
QUANT_ALGOS = (NVFP4, "MIXED_PRECISION", FP8)
EXPERT_DTYPES = {"fp4": frozenset({MXFP4}), "fp8": frozenset({FP8}), "bf16": frozenset({PLAIN})}
FORMATS = ("nvfp4-pack-quantized", "float-quantized", "mixed-precision")
BLOCK_SIZE = [*blocks.FP8]

IGNORE_FIELDS = ("ignore", "exclude_modules", "modules_to_not_convert")
"""Names of one field in different exports."""
FIELDS = {
    *("quant_method", "quant_algo", "moe_quant_algo", "kv_cache_quant_algo", "kv_cache_scheme", "group_size"),
    *("quantized_layers", "config_groups", "producer", "expert_dtype", *IGNORE_FIELDS),
    *("activation_scheme", "fmt", "scale_fmt", "weight_block_size"),
}
"""Fields of ModelOpt's and DeepSeek's ``quantization_config`` that are understood."""
COMPRESSED_FIELDS = {
    *("quant_method", "format", "config_groups", "ignore", "kv_cache_scheme", "quantization_status"),
    *("global_compression_ratio", "sparsity_config", "transform_config", "version", "provider"),
}
GROUP_FIELDS = {"weights", "input_activations", "output_activations", "targets", "format"}
ARGUMENT_FIELDS = {
    *("num_bits", "type", "symmetric", "group_size", "strategy", "block_structure", "dynamic", "actorder"),
    *("scale_dtype", "zp_dtype", "observer", "observer_kwargs"),
}
LAYER_FIELDS = {"quant_algo", "group_size", "awq_block_size"}
"""Fields of an entry of ``quantized_layers``; the last is what older exports call ``group_size``."""


@dataclass(frozen=True)
class Statement:
    """A field's statement about matrices.

    Attributes:
        field: its name, for errors; ``value``: what it holds.
        speaks_of: whether it says anything about a matrix.
        schemes: what it says the matrix is.
    """

    field: str
    value: object
    speaks_of: Callable[[TensorSpec], bool]
    schemes: frozenset[str]


@dataclass(frozen=True)
class Claims:
    """All statements of one file about the storage of matrices.

    Attributes:
        source: the file and its object, for errors.
        writer: whose words they are.
        statements: each must hold.
        raw: the object itself.
        listed: fields that speak of a module, by its name, which some matrix must have.
    """

    source: str
    writer: Writer
    raw: Mapping[str, Any]
    statements: list[Statement] = field(default_factory=list)
    listed: dict[str, str] = field(default_factory=dict)

    def error(self, name: str, expected: str, found: object) -> ConfigError:
        """The error that names field ``name``."""
        if len(name) > MAX_NAME:
            name = shown(name)
        return ConfigError(
            f"{self.source}.{name}': expected {expected}, found {shown(found)};"
            " correct the field or use the checkpoint that it describes"
        )


def read_claims(quantization: object, expert_dtype: object = None, *, source: str = "config.json: field") -> Claims:
    """Understand a ``quantization_config``.

    Args:
        expert_dtype: config.json's field, which says what the experts of DeepSeek's own releases are.
        source: names the file.

    Raises:
        ConfigError: names the field that is not understood, what was expected and what was found.
    """
    source = f"{source} 'quantization_config"
    if not isinstance(quantization, Mapping):
        raise ConfigError(f"{source}': expected an object, found {shown(quantization)}")
    if quantization.get("quant_method") == COMPRESSED:
        return _compressed(Claims(source, Writer.COMPRESSED_TENSORS, quantization))
    return _modelopt(Claims(source, Writer.MODELOPT, quantization), expert_dtype)


def read_manifest(manifest: object, file: str) -> Claims:
    """Understand a ``hf_quant_config.json``, whose fields lie below ``quantization``, or at the top as in config.json.

    Raises:
        ConfigError: as :func:`read_claims`.
    """
    inner = manifest.get("quantization", manifest) if isinstance(manifest, Mapping) else manifest
    if not isinstance(inner, Mapping):
        raise ConfigError(f"{file}: expected an object 'quantization', found {shown(inner)}")
    return _modelopt(Claims(f"{file}: field 'quantization", Writer.MODELOPT, inner), None)


def _modelopt(claims: Claims, expert_dtype: object) -> Claims:
    raw = claims.raw
    _require_fields(claims, "", raw, FIELDS)
    method = _known(claims, "quant_method", QUANT_METHODS)
    algo = _known(claims, "quant_algo", QUANT_ALGOS)
    moe = _known(claims, "moe_quant_algo", (NVFP4, MXFP4, FP8))
    _known(claims, "kv_cache_quant_algo", ("FP8",))  # what the cache holds is decided here: a wish, and no more
    _known(claims, "fmt", ("e4m3",))
    _known(claims, "scale_fmt", ("ue8m0",))
    _known(claims, "activation_scheme", ("dynamic",))
    inner_dtype = _known(claims, "expert_dtype", tuple(EXPERT_DTYPES))
    _check_cache(claims)
    if raw.get("group_size") not in (None, blocks.NVFP4.columns):
        raise claims.error("group_size", f"{blocks.NVFP4.columns}, of NVFP4", raw["group_size"])
    if raw.get("weight_block_size") not in (None, BLOCK_SIZE):
        raise claims.error("weight_block_size", str(BLOCK_SIZE), raw["weight_block_size"])
    ignored = _ignored(claims)
    layers = _quantized_layers(claims)
    groups = _groups(claims, raw.get("config_groups") or {})
    if method is None and algo is None and not layers:
        raise claims.error("quant_method", f"one of {', '.join(QUANT_METHODS)}", None)
    if method != "fp8" and algo is None and not layers:
        raise claims.error("quant_algo", f"one of {', '.join(QUANT_ALGOS)}", None)
    say = claims.statements.append

    def kept(spec: TensorSpec) -> bool:
        return not ignored.fit(spec.name)

    say(Statement(_ignore_field(raw), _ignore_value(raw), lambda spec: not kept(spec), ALL - {NVFP4}))
    for name in layers:
        claims.listed[name] = f"quantized_layers.{name}"
    for scheme in dict.fromkeys(layers.values()):
        names = Names([name for name, said in layers.items() if said == scheme])
        say(Statement("quantized_layers", scheme, _among(names), frozenset({scheme})))
    if moe is not None:
        say(Statement("moe_quant_algo", moe, lambda s: s.role is Role.EXPERT_LINEAR and kept(s), frozenset({moe})))
    for name, targets, scheme in groups:
        said = _fitting(targets, kept)
        say(Statement(f"config_groups.{name}", raw["config_groups"][name], said, frozenset({scheme})))
    if algo == NVFP4:
        say(Statement("quant_algo", algo, kept, frozenset({NVFP4})))
    elif algo != "MIXED_PRECISION":
        told = [
            said
            for said in claims.statements
            if NVFP4 in said.schemes and (algo is None or not said.field.startswith("config_groups"))
        ]
        if moe is None:
            _say_experts(claims, inner_dtype or expert_dtype, layers)
        say(Statement("quant_algo", algo, lambda spec: not any(said.speaks_of(spec) for said in told), ALL - {NVFP4}))
    return claims


def _say_experts(claims: Claims, expert_dtype: object, layers: Mapping[str, str]) -> None:
    """The statement of DeepSeek's own releases about their experts, if there is one."""
    if not isinstance(expert_dtype, str) or expert_dtype not in EXPERT_DTYPES or layers:
        return
    schemes = EXPERT_DTYPES[expert_dtype] if expert_dtype != "fp4" else frozenset({MXFP4, NVFP4})
    claims.statements.append(
        Statement("expert_dtype", expert_dtype, lambda spec: spec.role is Role.EXPERT_LINEAR, schemes)
    )


def _compressed(claims: Claims) -> Claims:
    raw = claims.raw
    _require_fields(claims, "", raw, COMPRESSED_FIELDS)
    _known(claims, "format", FORMATS)
    _known(claims, "quantization_status", ("compressed",))
    for name in ("sparsity_config", "transform_config"):
        if raw.get(name):
            raise claims.error(name, "nothing: matrices that are sparse or rotated are not read", raw[name])
    _check_cache(claims)
    ignore = _strings(claims, "ignore", raw.get("ignore") or [])
    ignored = _targets(claims, "ignore", ignore)
    groups = _groups(claims, raw.get("config_groups"))
    if not groups:
        raise claims.error("config_groups", "an object with a group for each scheme", raw.get("config_groups"))

    def kept(spec: TensorSpec) -> bool:
        return not ignored.fit(spec.name)

    say = claims.statements.append
    say(Statement("ignore", ignore, lambda spec: not kept(spec), frozenset({PLAIN})))
    earlier: list[Targets] = []
    for name, targets, scheme in groups:
        said = _fitting(targets, kept, tuple(earlier))
        say(Statement(f"config_groups.{name}", raw["config_groups"][name], said, frozenset({scheme})))
        earlier.append(targets)
    untold = tuple(earlier)
    say(Statement("config_groups", raw["config_groups"], lambda s: not _any_fits(untold, s), frozenset({PLAIN})))
    return claims


def _any_fits(groups: tuple[Targets, ...], spec: TensorSpec) -> bool:
    return any(group.fit(spec.name) for group in groups)


def _fitting(
    targets: Targets, kept: Callable[[TensorSpec], bool], earlier: tuple[Targets, ...] = ()
) -> Callable[[TensorSpec], bool]:
    """Matrices of a group: those of its targets that are kept and in no earlier group."""
    return lambda spec: targets.fit(spec.name) and kept(spec) and not _any_fits(earlier, spec)


def _among(names: Names) -> Callable[[TensorSpec], bool]:
    return lambda spec: names.fit(spec.name)


def _groups(claims: Claims, groups: object) -> list[tuple[str, Targets, str]]:
    """Name, targets and scheme of each entry of ``config_groups``."""
    if not isinstance(groups, Mapping):
        raise claims.error("config_groups", "an object", groups)
    found = []
    for name, group in groups.items():
        field = f"config_groups.{name}"
        if not isinstance(group, Mapping):
            raise claims.error(field, "an object with weights and targets", group)
        _require_fields(claims, f"{field}.", group, GROUP_FIELDS)
        if group.get("output_activations") is not None:
            raise claims.error(f"{field}.output_activations", "nothing", group["output_activations"])
        if group.get("format") not in (None, *FORMATS):
            raise claims.error(f"{field}.format", f"one of {', '.join(FORMATS)}", group["format"])
        if group.get("input_activations") is not None:
            _require_arguments(claims, f"{field}.input_activations", group["input_activations"])
        targets = _targets(claims, f"{field}.targets", _strings(claims, f"{field}.targets", group.get("targets")))
        found.append((name, targets, _scheme(claims, f"{field}.weights", group.get("weights"))))
    return found


def _require_arguments(claims: Claims, field: str, arguments: object) -> Mapping[str, Any]:
    if not isinstance(arguments, Mapping):
        raise claims.error(field, "an object", arguments)
    _require_fields(claims, f"{field}.", arguments, ARGUMENT_FIELDS)
    return arguments


def _scheme(claims: Claims, field: str, weights: object) -> str:
    arguments = _require_arguments(claims, field, weights)
    for name, allowed in (
        ("symmetric", (None, True)),
        ("dynamic", (None, False)),
        ("actorder", (None, False, "static", "weight")),
        ("type", ("float",)),
    ):
        if arguments.get(name) not in allowed:
            raise claims.error(f"{field}.{name}", " or ".join(map(str, allowed)), arguments.get(name))
    known: dict[tuple[object, ...], str] = {
        (4, "tensor_group", blocks.NVFP4.columns): NVFP4,
        (4, None, blocks.NVFP4.columns): NVFP4,
        (4, "group", blocks.MXFP4.columns): MXFP4,
        (8, "block", None): FP8,
    }
    what = (arguments.get("num_bits"), arguments.get("strategy"), arguments.get("group_size"))
    scheme = known.get(what) if all(isinstance(part, str | int | None) for part in what) else None
    if scheme is None or (scheme == FP8 and arguments.get("block_structure") != BLOCK_SIZE):
        raise claims.error(
            field,
            f"NVFP4 (num_bits 4, group_size {blocks.NVFP4.columns}) or FP8 (num_bits 8, strategy block, block_structure"
            f" {BLOCK_SIZE})",
            weights,
        )
    return scheme


def _quantized_layers(claims: Claims) -> dict[str, str]:
    """Scheme of each module that ``quantized_layers`` lists, draft layers left out."""
    layers = claims.raw.get("quantized_layers") or {}
    if not isinstance(layers, Mapping):
        raise claims.error("quantized_layers", "an object", layers)
    found = {}
    for name, said in layers.items():
        if name.removeprefix(PREFIX).startswith(MTP_PREFIX):
            continue
        field = f"quantized_layers.{name}"
        algo = said.get("quant_algo") if isinstance(said, Mapping) else None
        if not isinstance(algo, str) or algo not in (NVFP4, MXFP4, FP8):
            raise claims.error(field, "an object with quant_algo NVFP4, MXFP4 or FP8", said)
        _require_fields(claims, f"{field}.", said, LAYER_FIELDS)
        sizes = {said.get("group_size"), said.get("awq_block_size")} - {None}
        if algo == NVFP4 and sizes - {blocks.NVFP4.columns}:
            raise claims.error(field, f"group_size {blocks.NVFP4.columns}", said)
        found[name] = algo
    return found


def _ignore_field(raw: Mapping[str, Any]) -> str:
    return next((name for name in IGNORE_FIELDS if name in raw), IGNORE_FIELDS[0])


def _ignore_value(raw: Mapping[str, Any]) -> object:
    return raw.get(_ignore_field(raw)) or []


def _ignored(claims: Claims) -> Wildcards:
    """Matrices that :data:`IGNORE_FIELDS` leave as they were."""
    return Wildcards(_strings(claims, _ignore_field(claims.raw), _ignore_value(claims.raw)))


def _strings(claims: Claims, field: str, patterns: object) -> list[str]:
    if not isinstance(patterns, list) or not all(isinstance(pattern, str) for pattern in patterns):
        raise claims.error(field, "a list of patterns", patterns)
    return patterns


def _targets(claims: Claims, field: str, patterns: list[str]) -> Targets:
    try:
        return Targets(patterns)
    except re.error as error:
        raise claims.error(field, f"regular expressions ({error})", patterns) from error


def _check_cache(claims: Claims) -> None:
    """Check an exporter's words for an FP8 cache, which it may ask for."""
    scheme = claims.raw.get("kv_cache_scheme")
    if scheme is not None and not (isinstance(scheme, Mapping) and scheme.get("num_bits") == 8):
        raise claims.error("kv_cache_scheme", "nothing, or an object with num_bits 8", scheme)


def _require_fields(claims: Claims, prefix: str, found: Mapping[str, Any], known: set[str]) -> None:
    for name, value in found.items():
        if name not in known:
            raise claims.error(f"{prefix}{name}", f"one of the fields {', '.join(sorted(known))}", value)


def _known(claims: Claims, name: str, known: tuple[str, ...]) -> str | None:
    value = claims.raw.get(name)
    if value is not None and not (isinstance(value, str) and value in known):
        raise claims.error(name, f"one of {', '.join(known)}", value)
    return value
