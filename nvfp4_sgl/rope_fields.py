"""``rope_scaling`` and ``rope_parameters`` of config.json: YaRN's parameters, and what says them again.

Window-only layers turn by ``rope_theta`` without YaRN, all others by ``compress_rope_theta`` with it. There is no
attention factor. transformers writes the same as ``rope_parameters``, flat or as objects ``main`` and ``compress``;
whatever contradicts what is computed is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nvfp4_sgl.config_fields import YARN, same
from nvfp4_sgl.errors import ConfigError
from nvfp4_sgl.files import shown

RELEASED = "use the config.json of the release"
"""What to do about parameters that are not what is computed."""
_ONE = (1, None)
_ALWAYS: dict[str, tuple[object, ...]] = {
    "attention_factor": _ONE,
    "mscale": _ONE,
    "mscale_all_dim": _ONE,
    "truncate": (True, None),
}
"""Parameters of transformers' YaRN that are not read, with the values that are computed."""


@dataclass(frozen=True)
class YarnConfig:
    """YaRN parameters of the compressed layers' RoPE (``rope_scaling``)."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float
    beta_slow: float


@dataclass(frozen=True)
class RopeSaid:
    """RoPE's parameters as the other fields of config.json say them.

    Attributes:
        theta, compress_theta: ``rope_theta`` and ``compress_rope_theta``. share: of a head that is turned.
    """

    theta: float
    compress_theta: float
    share: float


def read_yarn(scaling: object, source: str, said: RopeSaid) -> YarnConfig:
    """Parse ``rope_scaling``; ConfigError, which names ``source`` and the field, if it is not what is computed."""
    where = f"{source}: field 'rope_scaling'"
    if not isinstance(scaling, dict) or not scaling.keys() & {"type", "rope_type"}:
        raise ConfigError(f"{where}: expected an object with type 'yarn', found {shown(scaling)}; {RELEASED}")
    for name, rule in YARN.items():
        if not rule.takes(scaling.get(name)):
            found = shown(scaling[name]) if name in scaling else "nothing"
            raise ConfigError(f"{source}: rope_scaling: field '{name}': expected {rule}, found {found}; {RELEASED}")
    yarn = YarnConfig(
        float(scaling["factor"]),
        scaling["original_max_position_embeddings"],
        float(scaling["beta_fast"]),
        float(scaling["beta_slow"]),
    )
    if not yarn.beta_fast > yarn.beta_slow:
        raise ConfigError(
            f"{where}: expected beta_fast > beta_slow, found {shown(scaling['beta_fast'])} and"
            f" {shown(scaling['beta_slow'])}; {RELEASED}"
        )
    # transformers keeps either base there, and reads neither.
    _check(scaling, where, _yarn(yarn, said, (said.compress_theta, said.theta)))
    return yarn


def check_parameters(parameters: object, source: str, yarn: YarnConfig, said: RopeSaid) -> None:
    """ConfigError if ``rope_parameters``, which may be null, contradicts ``yarn`` or what is ``said`` elsewhere."""
    where = f"{source}: field 'rope_parameters'"
    if parameters is None:
        return
    if not isinstance(parameters, dict):
        raise ConfigError(f"{where}: expected an object, found {shown(parameters)}; {RELEASED}")
    nested = parameters.keys() & {"main", "compress"}
    if not nested:
        _check(parameters, where, _yarn(yarn, said, (said.compress_theta, said.theta)), required=("rope_type", "type"))
        return
    plain: dict[str, tuple[object, ...]] = {
        **dict.fromkeys(("rope_type", "type"), ("default", None)),
        "rope_theta": (said.theta, None),
        "partial_rotary_factor": (said.share, None),
        "attention_factor": _ONE,
    }
    expected = {"main": plain, "compress": _yarn(yarn, said, (said.compress_theta,))}
    if unknown := sorted(parameters.keys() - expected.keys()):
        raise ConfigError(
            f"{where}: expected only 'main' and 'compress', found {shown(unknown)}, too; remove the others"
        )
    for name in sorted(nested):
        inner = parameters[name]
        if not isinstance(inner, dict):
            raise ConfigError(f"{where}: '{name}': expected an object, found {shown(inner)}; {RELEASED}")
        required = ("rope_type", "type") if name == "compress" else ()
        _check(inner, f"{where}: '{name}'", expected[name], required=required)


def _yarn(yarn: YarnConfig, said: RopeSaid, bases: tuple[float, ...]) -> dict[str, tuple[object, ...]]:
    return {
        **dict.fromkeys(("rope_type", "type"), ("yarn",)),
        **{name: (getattr(yarn, name),) for name in YARN},
        **_ALWAYS,
        "rope_theta": (*bases, None),
        "partial_rotary_factor": (said.share, None),
    }


def _check(
    found: Mapping[str, Any], where: str, expected: Mapping[str, tuple[object, ...]], required: tuple[str, ...] = ()
) -> None:
    """ConfigError for a field with another value than expected, for an unknown one, or if none of some is there."""
    if required and not found.keys() & set(required):
        raise ConfigError(f"{where}: expected {required[0]} 'yarn', found no {required[0]}; {RELEASED}")
    for name, value in found.items():
        if name not in expected:
            known = ", ".join(expected)
            raise ConfigError(f"{where}: expected no other fields than {known}, found {shown(name)}; remove it")
        if not any(same(value, one) for one in expected[name]):
            words = " or ".join(repr(one) for one in expected[name] if one is not None)
            raise ConfigError(
                f"{where}: '{name}': expected {words}, which is what is computed, found {shown(value)}; correct it, or"
                " remove it"
            )
