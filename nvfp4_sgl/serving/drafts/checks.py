"""Checks that flags of speculative decoding fit each other, checkpoint and target, before anything is loaded."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nvfp4_sgl.cache.layout import DRAFTED_TOKENS
from nvfp4_sgl.checkpoint.drafts import DRAFTS, draft_kind, verify_draft
from nvfp4_sgl.checkpoint.verified import Verified
from nvfp4_sgl.errors import ConfigError, UnsupportedError
from nvfp4_sgl.sglang_defaults import DRAFT_STEPS
from nvfp4_sgl.targets.target import targets

SERVED = ("EAGLE", "NEXTN")
"""Those that are served."""

NEED_ALGORITHM = (
    "speculative_draft_model_path",
    "speculative_num_steps",
    "speculative_eagle_topk",
    "speculative_num_draft_tokens",
)
SIMULATED = "SGLANG_SIMULATE_ACC_LEN"
"""Environment variable of SGLang that has as many guesses accepted as it says."""


def check_flags(given: Mapping[str, Any]) -> None:
    """Refuse flags of drafts that contradict each other.

    Raises:
        ConfigError: names the flag, what was found and what was expected.
        UnsupportedError: an algorithm that is not implemented.
    """
    algorithm = given["speculative_algorithm"]
    if algorithm is None:
        for name in NEED_ALGORITHM:
            if given[name] is not None:
                raise ConfigError(f"{_flag(name)} {given[name]}: expected --speculative-algorithm, too; add it")
        return
    if algorithm.upper() not in DRAFTS:
        raise UnsupportedError(f"--speculative-algorithm {algorithm}: not implemented; expected {' or '.join(SERVED)}")
    steps, topk, tokens = (given[f"speculative_{name}"] for name in ("num_steps", "eagle_topk", "num_draft_tokens"))
    if topk not in (None, 1):
        raise ConfigError(f"--speculative-eagle-topk {topk}: expected 1: guesses are a chain; leave it out")
    if steps is None and (topk, tokens) != (None, None):
        raise ConfigError("--speculative-num-steps: found none, expected it beside the flags of guesses; add it")
    most = DRAFTED_TOKENS - 1
    if steps is not None and not 1 <= steps <= most:
        raise ConfigError(
            f"--speculative-num-steps {steps}: expected 1 to {most}: a round has a row more, and the compressors' rings"
            f" hold {DRAFTED_TOKENS}"
        )
    if tokens is not None and tokens != steps + 1:
        raise ConfigError(
            f"--speculative-num-draft-tokens {tokens}: expected {steps + 1}, --speculative-num-steps and one; leave it"
            " out"
        )
    if float(os.environ.get(SIMULATED) or -1) > 0:
        raise UnsupportedError(f"{SIMULATED}: not implemented by this package; unset it")


def check_draft(given: Mapping[str, Any], verified: Verified, target: str, overrides: Mapping[str, Any]) -> None:
    """Refuse an algorithm that the checkpoint has no draft for, or the target does not serve.

    Args:
        overrides: those of ``--json-model-override-args``.

    Raises:
        CheckpointError: the draft's tensors are not those of its kind.
        ConfigError, UnsupportedError: as :func:`check_flags`.
    """
    algorithm, path = given["speculative_algorithm"], given["speculative_draft_model_path"]
    if algorithm is None:
        return
    flag, wanted = f"--speculative-algorithm {algorithm}", DRAFTS[algorithm.upper()]
    if verified.is_dummy or "convert_at_load" in overrides:
        how = "--load-format dummy" if verified.is_dummy else "convert_at_load"
        raise UnsupportedError(f"{flag} with {how}: not implemented; leave one of them out")
    found, directory = draft_kind(verified.inventory), verified.inventory.directory
    if found is not wanted:
        words = "none" if found is None else f"a {found.value} draft ('{found.mark}')"
        others = [one for one in DRAFTS if DRAFTS[one] is found]
        remedy = f"use {' or '.join(others)}" if others else "leave the flag out"
        raise ConfigError(f"{flag}: expected {directory} with a {wanted.value} draft, found {words}; {remedy}")
    if algorithm.upper() not in SERVED:
        raise UnsupportedError(f"{flag}: not implemented; leave the flag out, and nothing is drafted")
    drafting = [each.word for each in targets() if each.drafts]
    if target not in drafting:
        where = " and ".join(drafting)
        raise UnsupportedError(f"{flag}: not implemented on target {target}, only on {where}; leave the flag out")
    if path is not None and not (Path(path).is_dir() and Path(path).samefile(given["model_path"])):
        raise ConfigError(
            f"--speculative-draft-model-path {path}: expected --model-path, {given['model_path']}, which bundles its"
            " draft; leave it out"
        )
    if given["tp_size"] != 1:
        raise UnsupportedError(f"{flag} with --tp-size {given['tp_size']}: not implemented; leave one of them out")
    verify_draft(verified.inventory, verified.raw, verified.config)


def declared(given: Mapping[str, Any]) -> dict[str, Any]:
    """Settings that follow from the flags: SGLang wants all of them if it is given one, and one name."""
    if given["speculative_algorithm"] is None:
        return {}
    steps = given["speculative_num_steps"] or DRAFT_STEPS
    return {
        "speculative_algorithm": "EAGLE",
        "speculative_num_steps": steps,
        "speculative_eagle_topk": 1,
        "speculative_num_draft_tokens": steps + 1,
    }


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
