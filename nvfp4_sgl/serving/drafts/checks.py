"""Checks that flags of speculative decoding fit each other, checkpoint and target, before anything is loaded."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nvfp4_sgl.cache.layout import DRAFTED_TOKENS
from nvfp4_sgl.checkpoint.drafts import DRAFTS, DraftKind, claimed_kind, draft_kind
from nvfp4_sgl.checkpoint.verified import Verified
from nvfp4_sgl.convert.options import parse_at_load
from nvfp4_sgl.errors import ConfigError, UnsupportedError
from nvfp4_sgl.serving.drafts import dspark_checks
from nvfp4_sgl.serving.drafts.simulated import check_simulated
from nvfp4_sgl.sglang_defaults import DRAFT_STEPS
from nvfp4_sgl.targets import requirements
from nvfp4_sgl.targets.choose import mode_of
from nvfp4_sgl.targets.target import targets

NEED_ALGORITHM = (
    "speculative_draft_model_path",
    "speculative_num_steps",
    "speculative_eagle_topk",
    "speculative_num_draft_tokens",
    "speculative_dspark_block_size",
)


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
        raise UnsupportedError(f"--speculative-algorithm {algorithm}: not implemented; expected {' or '.join(DRAFTS)}")
    if drafts_blocks(given):
        dspark_checks.check_flags(given)
        return
    block = given["speculative_dspark_block_size"]
    if block is not None:
        raise ConfigError(
            f"--speculative-dspark-block-size {block}: expected --speculative-algorithm DSPARK, found {algorithm};"
            " leave one of them out"
        )
    steps, topk, tokens = (given[f"speculative_{name}"] for name in ("num_steps", "eagle_topk", "num_draft_tokens"))
    if topk not in (None, 1):
        raise ConfigError(f"--speculative-eagle-topk {topk}: expected 1: guesses are a chain; leave it out")
    for flag, value in (("eagle-topk", topk), ("num-draft-tokens", tokens)):
        if steps is None and value is not None:
            raise ConfigError(f"--speculative-{flag} {value}: expected --speculative-num-steps, too; add it")
    most = DRAFTED_TOKENS - 1
    if steps is not None and not 1 <= steps <= most:
        raise ConfigError(
            f"--speculative-num-steps {steps}: expected 1 to {most}: a round verifies one token more, and the"
            f" compressors' rings hold {DRAFTED_TOKENS}; leave it out"
        )
    if tokens is not None and tokens != steps + 1:
        raise ConfigError(
            f"--speculative-num-draft-tokens {tokens}: expected {steps + 1}, one more than --speculative-num-steps;"
            " leave it out"
        )
    check_simulated((steps or DRAFT_STEPS) + 1)


def drafts_blocks(given: Mapping[str, Any]) -> bool:
    """Whether the algorithm that is given is DSpark."""
    return DRAFTS.get((given["speculative_algorithm"] or "").upper()) is DraftKind.DSPARK


def check_draft(given: Mapping[str, Any], verified: Verified, target: str, overrides: Mapping[str, Any]) -> None:
    """Refuse an algorithm that the checkpoint has no draft for, or the target does not serve.

    Args:
        overrides: those of ``--json-model-override-args``.

    Raises:
        CheckpointError: the draft's tensors are not those of its kind.
        ConfigError, UnsupportedError: as :func:`check_flags`, and of :func:`.requirements.check_draft`.
    """
    algorithm, path = given["speculative_algorithm"], given["speculative_draft_model_path"]
    if algorithm is None:
        if "convert_at_load" in overrides and parse_at_load(overrides["convert_at_load"]).drafts:
            raise ConfigError(
                "convert_at_load: 'drafts': expected --speculative-algorithm, too; add it, or leave the word out"
            )
        return
    flag, wanted = f"--speculative-algorithm {algorithm}", DRAFTS[algorithm.upper()]
    found = claimed_kind(verified.raw) if verified.is_dummy else draft_kind(verified.inventory)
    directory = verified.inventory.directory
    if found is not wanted:
        words = "none" if found is None else f"{found.words} ('{found.mark}')"
        others = [one for one in DRAFTS if DRAFTS[one] is found]
        remedy = f"use {' or '.join(others)}" if others else "leave the flag out"
        raise ConfigError(f"{flag}: expected {directory} with {wanted.words}, found {words}; {remedy}")
    drafting = [each.word for each in targets() if each.drafts]
    if target not in drafting:
        where = " and ".join(dict.fromkeys(drafting))
        raise UnsupportedError(f"{flag}: not implemented on target {target}, only on {where}; leave the flag out")
    if path is not None and not (Path(path).is_dir() and Path(path).samefile(given["model_path"])):
        raise ConfigError(
            f"--speculative-draft-model-path {path}: expected --model-path, {given['model_path']}, which bundles its"
            " draft; leave it out"
        )
    draft = verified.draft()
    assert draft is not None, "there is one of this kind"
    mode = mode_of(target, {**verified.raw, **overrides}.get("activation_mode"))
    requirements.check_draft(target, draft, verified.config, mode)
    if wanted is DraftKind.DSPARK:
        dspark_checks.check_draft(given, verified, target)


def prepare_environment(given: Mapping[str, Any]) -> None:
    """Set the environment variables of SGLang that the algorithm needs, for this process and those that it starts."""
    if drafts_blocks(given):
        os.environ[dspark_checks.GREEDY_DRAFT] = "1"
        os.environ.setdefault(dspark_checks.INPUTS_ONCE, "1")


def declared(given: Mapping[str, Any], verified: Verified) -> dict[str, Any]:
    """Settings that follow from the flags: SGLang wants all of them if it is given one, and one name."""
    if given["speculative_algorithm"] is None:
        return {}
    if drafts_blocks(given):
        return dspark_checks.declared(given, verified)
    steps = given["speculative_num_steps"] or DRAFT_STEPS
    return {
        "speculative_algorithm": "EAGLE",
        "speculative_num_steps": steps,
        "speculative_eagle_topk": 1,
        "speculative_num_draft_tokens": steps + 1,
    }


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
