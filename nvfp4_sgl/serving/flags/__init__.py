"""Every argument of SGLang, in one of three tables: it works, it is refused, or it has no effect with our model.

A test enumerates SGLang's ``ServerArgs``: a name or a choice that no row knows fails it, and so does a row of a name
that SGLang no longer has.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from nvfp4_sgl.errors import ConfigError, UnsupportedError
from nvfp4_sgl.serving.flags.experts import EXPERTS
from nvfp4_sgl.serving.flags.front_end import FRONT_END_FLAGS
from nvfp4_sgl.serving.flags.kernels import KERNELS
from nvfp4_sgl.serving.flags.model import MODEL
from nvfp4_sgl.serving.flags.observability import OBSERVABILITY
from nvfp4_sgl.serving.flags.other_models import OTHER_MODELS
from nvfp4_sgl.serving.flags.parallel import PARALLEL
from nvfp4_sgl.serving.flags.row import Refused, Row, WithoutEffect, Works
from nvfp4_sgl.serving.flags.scheduling import SCHEDULING
from nvfp4_sgl.serving.flags.speculation import SPECULATION

TABLES: Mapping[str, Mapping[str, Row]] = {
    "model": MODEL,
    "scheduling": SCHEDULING,
    "parallel": PARALLEL,
    "front end": FRONT_END_FLAGS,
    "observability": OBSERVABILITY,
    "kernels": KERNELS,
    "experts": EXPERTS,
    "speculation": SPECULATION,
    "other models": OTHER_MODELS,
}
"""Rows by topic; a name is in one of them."""

INTERNAL = ("_radix_eviction_policy_explicitly_set", "_swa_full_tokens_ratio_explicitly_set")
"""Fields in which SGLang notes whether a flag was given; no user sets them."""

SPELLED: Mapping[str, str] = {
    "fp8_gemm_runner_backend": "--fp8-gemm-backend",
    "fp4_gemm_runner_backend": "--fp4-gemm-backend",
    "ep_join_mode": "--elastic-ep-join-mode",
    "ep_join_rank_offset": "--elastic-ep-join-rank-offset",
}
"""Flags that are not spelled as their field."""

ROWS: Mapping[str, Row] = {name: row for table in TABLES.values() for name, row in table.items()}
"""Every row."""


def flag(field: str) -> str:
    """The command-line flag of a ``ServerArgs`` field."""
    return SPELLED.get(field, "--" + field.replace("_", "-"))


def check(given: Mapping[str, Any]) -> None:
    """Refuse arguments with values that are not implemented.

    Raises:
        ConfigError: a value that is not among those of a flag that works.
        UnsupportedError: a flag that is refused, or one of which nothing is known.
    """
    for name, value in given.items():
        row = ROWS.get(name)
        if isinstance(row, Refused) and value not in row.off:
            raise UnsupportedError(f"{flag(name)} {value}: {row.why}")
        if isinstance(row, Works) and row.values is not None:
            check_value(name, value, row.values)
        if row is None and name not in INTERNAL:
            raise UnsupportedError(f"{flag(name)}: unknown to this package; install the SGLang version that it names")


def check_value(name: str, value: Any, allowed: tuple[Any, ...], where: str = "") -> None:
    """Refuse a ``value`` of a flag that is not among ``allowed``."""
    if value not in allowed:
        values = ", ".join(str(one) for one in allowed if one is not None)
        raise ConfigError(f"{flag(name)} {value}: expected one of {values}{where}")


def without_effect(given: Mapping[str, Any], defaults: Mapping[str, Any]) -> Iterator[str]:
    """A line for each given flag that has no effect."""
    for name, value in given.items():
        row = ROWS.get(name)
        if isinstance(row, WithoutEffect) and value != defaults[name]:
            yield f"{flag(name)} {value}: without effect for this model: {row.why}"
