"""Checks of DSpark's flags, and what follows from them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from nvfp4_sgl.checkpoint.verified import Verified
from nvfp4_sgl.draft_config import MAX_BLOCK, DsparkConfig
from nvfp4_sgl.errors import ConfigError, UnsupportedError
from nvfp4_sgl.serving.drafts.simulated import check_simulated
from nvfp4_sgl.targets.target import targets

VERIFY_MODE, STATIC = "SGLANG_RAGGED_VERIFY_MODE", "static"
"""Environment variable of SGLang that has fewer guesses verified where the confidence head expects little."""
GREEDY_DRAFT = "SGLANG_DSPARK_USE_GREEDY_DRAFT"
"""Environment variable of SGLang: guesses are the likeliest tokens, whatever a request samples by."""
INPUTS_ONCE = "SGLANG_OPT_DSV41_DSPARK_PREPARE_INPUTS_ONCE"
"""Environment variables of SGLang, for any DSpark draft: slots, positions and the decided token of a round are one
launch; the draft's graph puts the rows to verify together."""
SIMULATE_GREEDY = "SGLANG_SIMULATE_ACC_GREEDY"
"""Environment variable of SGLang that has rounds of simulated acceptance forget how requests are sampled."""
TRUE = ("1", "true", "yes", "y")
"""Values of such variables that SGLang takes for true, in small letters."""


def check_flags(given: Mapping[str, Any]) -> None:
    """Refuse flags and environment variables that contradict DSpark.

    Raises:
        ConfigError: names the flag, what was found and what was expected.
        UnsupportedError: what is not implemented.
    """
    for name in ("num_steps", "eagle_topk"):
        if given[f"speculative_{name}"] is not None:
            flag = f"--speculative-{name.replace('_', '-')}"
            raise ConfigError(
                f"{flag} {given[f'speculative_{name}']}: expected none with DSPARK, which guesses a block at once;"
                " leave it out"
            )
    block = given["speculative_dspark_block_size"]
    if block is not None and not 1 <= block <= MAX_BLOCK:
        raise ConfigError(
            f"--speculative-dspark-block-size {block}: expected 1 to {MAX_BLOCK}: a round verifies one token more, and"
            f" the compressors' rings hold {MAX_BLOCK + 1}; leave it out"
        )
    greedy_rounds = os.environ.get(SIMULATE_GREEDY) or "0"
    if greedy_rounds.lower() in TRUE:
        raise UnsupportedError(f"{SIMULATE_GREEDY}={greedy_rounds}: not implemented by this package; unset it")
    mode, greedy = os.environ.get(VERIFY_MODE) or STATIC, os.environ.get(GREEDY_DRAFT) or "1"
    if mode != STATIC:
        raise UnsupportedError(f"{VERIFY_MODE}={mode}: not implemented by this package; unset it")
    if greedy.lower() not in TRUE:
        raise UnsupportedError(
            f"{GREEDY_DRAFT}={greedy}: not implemented by this package, which drafts greedily; unset it"
        )


def check_draft(given: Mapping[str, Any], verified: Verified, target: str) -> None:
    """Refuse a target that DSpark is not served on, and rows that are not one more than a block.

    Raises:
        ConfigError, UnsupportedError: as :func:`check_flags`.
    """
    flag = f"--speculative-algorithm {given['speculative_algorithm']}"
    drafting = dict.fromkeys(each.word for each in targets() if each.drafts_blocks)
    if target not in drafting:
        where = " and ".join(drafting)
        raise UnsupportedError(f"{flag}: not implemented on target {target}, only on {where}; leave the flag out")
    found, rows = given["speculative_num_draft_tokens"], block_of(given, verified) + 1
    if found not in (None, rows):
        other = f", or give --speculative-dspark-block-size {found - 1}" if 1 <= found - 1 <= MAX_BLOCK else ""
        raise ConfigError(
            f"--speculative-num-draft-tokens {found}: expected {rows}, one more than the block; leave it out{other}"
        )
    check_simulated(rows)


def block_of(given: Mapping[str, Any], verified: Verified) -> int:
    """Tokens of a block: those of ``--speculative-dspark-block-size``, else the checkpoint's."""
    asked_for = given["speculative_dspark_block_size"]
    return int(asked_for or DsparkConfig.parse(verified.raw, verified.config).block)


def declared(given: Mapping[str, Any], verified: Verified) -> dict[str, Any]:
    """Arguments that SGLang is given; a round is a step of one chain to it."""
    return {
        "speculative_algorithm": "DSPARK",
        "speculative_num_steps": 1,
        "speculative_eagle_topk": 1,
        "speculative_num_draft_tokens": block_of(given, verified) + 1,
    }
