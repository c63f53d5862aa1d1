"""Flags of drafts that fit neither each other nor the checkpoint are refused before anything is loaded, by name."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from nvfp4_sgl.checkpoint.verified import Verified, verify
from nvfp4_sgl.convert.at_load import converted_at_load
from nvfp4_sgl.convert.options import parse_at_load
from nvfp4_sgl.errors import CheckpointError, ConfigError, Nvfp4SglError, UnsupportedError
from nvfp4_sgl.serving.drafts import checks, dspark_checks, simulated
from nvfp4_sgl.serving.drafts.dspark_checks import GREEDY_DRAFT
from nvfp4_sgl.synthetic.random_weights import verify_dummy
from nvfp4_sgl.synthetic.tiny import write_tiny
from nvfp4_sgl.targets.target import CPU, SM100, TARGETS
from tests.support.damage import remove

NOTHING: dict[str, Any] = dict.fromkeys(("speculative_algorithm", *checks.NEED_ALGORITHM))
EAGLE, DSPARK = ({"speculative_algorithm": algorithm} for algorithm in ("EAGLE", "DSPARK"))

UNREAD: Any = None
"""The checkpoint, which MTP's flags do not depend on."""

WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "steps without an algorithm": (
        {"speculative_num_steps": 3},
        "--speculative-num-steps 3: expected --speculative-algorithm",
    ),
    "a path without one": (
        {"speculative_draft_model_path": "here"},
        "--speculative-draft-model-path here: expected --speculative-algorithm",
    ),
    "another algorithm": (
        {"speculative_algorithm": "NGRAM"},
        "--speculative-algorithm NGRAM: not implemented; expected EAGLE or NEXTN or DSPARK",
    ),
    "a tree": (
        EAGLE | {"speculative_num_steps": 3, "speculative_eagle_topk": 4},
        "--speculative-eagle-topk 4: expected 1",
    ),
    "no steps": (
        EAGLE | {"speculative_num_draft_tokens": 4},
        "--speculative-num-draft-tokens 4: expected --speculative-num-steps, too; add it",
    ),
    "a chain without steps": (
        EAGLE | {"speculative_eagle_topk": 1},
        "--speculative-eagle-topk 1: expected --speculative-num-steps, too; add it",
    ),
    "too many steps": (EAGLE | {"speculative_num_steps": 10}, "--speculative-num-steps 10: expected 1 to 9"),
    "steps of nothing": (EAGLE | {"speculative_num_steps": 0}, "--speculative-num-steps 0: expected 1 to 9"),
    "tokens of other steps": (
        EAGLE | {"speculative_num_steps": 2, "speculative_num_draft_tokens": 4},
        "--speculative-num-draft-tokens 4: expected 3, one more than --speculative-num-steps; leave it out",
    ),
    "a block without an algorithm": (
        {"speculative_dspark_block_size": 4},
        "--speculative-dspark-block-size 4: expected --speculative-algorithm",
    ),
    "a block of MTP": (
        EAGLE | {"speculative_dspark_block_size": 4},
        "--speculative-dspark-block-size 4: expected --speculative-algorithm DSPARK, found EAGLE",
    ),
    "steps of DSpark": (DSPARK | {"speculative_num_steps": 1}, "--speculative-num-steps 1: expected none with DSPARK"),
    "a tree of DSpark": (DSPARK | {"speculative_eagle_topk": 1}, "--speculative-eagle-topk 1: expected none"),
    "a block of nothing": (
        DSPARK | {"speculative_dspark_block_size": 0},
        "--speculative-dspark-block-size 0: expected 1 to 9",
    ),
    "a block too long": (
        DSPARK | {"speculative_dspark_block_size": 10},
        "--speculative-dspark-block-size 10: expected 1 to 9",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_flags_that_contradict_each_other(name: str) -> None:
    given, message = WRONG[name]
    with pytest.raises((ConfigError, UnsupportedError), match=f"^{re.escape(message)}"):
        checks.check_flags(NOTHING | given)


@pytest.mark.parametrize("steps", [None, 1, 9])
def test_flags_that_fit(steps: int | None) -> None:
    given = NOTHING | {"speculative_algorithm": "nextn", "speculative_num_steps": steps}
    checks.check_flags(given)
    declared = checks.declared(given, UNREAD)
    number = steps or 3
    chain = {"speculative_num_steps": number, "speculative_eagle_topk": 1, "speculative_num_draft_tokens": number + 1}
    assert declared == EAGLE | chain and checks.declared(NOTHING, UNREAD) == {}
    checks.check_flags(given | declared)


@pytest.fixture
def simulate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """``simulate(text)`` sets the environment variable."""
    simulated.simulated_length.cache_clear()
    yield lambda text: monkeypatch.setenv(simulated.SIMULATED, text)
    simulated.simulated_length.cache_clear()


def test_simulated_acceptance_is_said(simulate: Callable[[str], None], caplog: pytest.LogCaptureFixture) -> None:
    simulate("2.5")
    checks.check_flags(NOTHING | EAGLE)
    assert "SIMULATED ACCEPTANCE (SGLANG_SIMULATE_ACC_LEN): a round accepts 2.5 tokens" in caplog.text


@pytest.mark.parametrize("text", ["4.5", "0.5", "half", "nan", "inf"])
def test_simulated_acceptance_that_cannot_be(text: str, simulate: Callable[[str], None]) -> None:
    simulate(text)
    with pytest.raises(ConfigError, match=f"^{simulated.SIMULATED}={text}: expected"):
        checks.check_flags(NOTHING | EAGLE)


@pytest.mark.parametrize("text", ["", "0", "-1"])
def test_acceptance_that_is_not_simulated(
    text: str, simulate: Callable[[str], None], caplog: pytest.LogCaptureFixture
) -> None:
    """As SGLang has it: only a positive number simulates."""
    simulate(text)
    checks.check_flags(NOTHING | EAGLE)
    assert simulated.simulated_length() is None and not caplog.text


@pytest.mark.parametrize("variable", simulated.WAYS)
def test_simulated_acceptance_in_another_way(
    variable: str, simulate: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is refused, not left out: a figure would be of something else than was asked for."""
    monkeypatch.setenv(variable, simulated.WAYS[variable])
    simulate("2.5")
    checks.check_flags(NOTHING | EAGLE)
    monkeypatch.setenv(variable, "another")
    with pytest.raises(UnsupportedError, match=f"^{variable}=another: expected {simulated.WAYS[variable]}, no other"):
        checks.check_flags(NOTHING | EAGLE)


def test_simulated_acceptance_of_dspark(
    simulate: Callable[[str], None], checkpoints: dict[str, Verified], caplog: pytest.LogCaptureFixture
) -> None:
    """A round accepts at most one row more than the checkpoint's block has."""
    given = NOTHING | DSPARK | {"model_path": checkpoints["dspark"].inventory.directory}
    simulate("6")
    checks.check_flags(given)
    checks.check_draft(given, checkpoints["dspark"], "cpu", {})
    assert "a round accepts 6 tokens" in caplog.text
    with pytest.raises(ConfigError, match=f"^{simulated.SIMULATED}=6: expected 1 to 3, a round's verified tokens"):
        checks.check_draft(given | {"speculative_dspark_block_size": 2}, checkpoints["dspark"], "cpu", {})


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        (dspark_checks.VERIFY_MODE, "compact"),
        (GREEDY_DRAFT, "0"),
        *((dspark_checks.SIMULATE_GREEDY, value) for value in ("true", "1", "yes", "Y")),
    ],
)
def test_ways_of_dspark_that_are_not_there(variable: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, value)
    checks.check_flags(NOTHING | EAGLE)
    with pytest.raises(UnsupportedError, match=f"^{variable}={value}: not implemented"):
        checks.check_flags(NOTHING | DSPARK)


@pytest.mark.parametrize(("block", "tokens", "rows"), [(None, None, 6), (None, 6, 6), (1, None, 2), (9, 10, 10)])
def test_blocks_that_fit(
    block: int | None,
    tokens: int | None,
    rows: int,
    checkpoints: dict[str, Verified],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Five tokens unless another number is given; SGLang is told a row more, to draft greedily, and to launch less."""
    monkeypatch.setenv(GREEDY_DRAFT, "")
    monkeypatch.setenv(dspark_checks.INPUTS_ONCE, "")
    monkeypatch.delenv(dspark_checks.INPUTS_ONCE)
    verified = checkpoints["dspark"]
    given = {"speculative_dspark_block_size": block, "speculative_num_draft_tokens": tokens}
    given = NOTHING | {"speculative_algorithm": "dspark", "model_path": verified.inventory.directory} | given
    checks.check_flags(given)
    checks.check_draft(given, verified, "cpu", {})
    checks.prepare_environment(given)
    one_step = {"speculative_num_steps": 1, "speculative_eagle_topk": 1}
    assert checks.declared(given, verified) == DSPARK | one_step | {"speculative_num_draft_tokens": rows}
    assert os.environ[GREEDY_DRAFT] == os.environ[dspark_checks.INPUTS_ONCE] == "1"
    monkeypatch.setenv(dspark_checks.INPUTS_ONCE, "0")
    checks.prepare_environment(given)
    assert os.environ[dspark_checks.INPUTS_ONCE] == "0", "who sets it has it"


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Verified]:
    folder = tmp_path_factory.mktemp("drafts")
    for draft in ("none", "mtp", "dspark"):
        write_tiny(folder / draft, "bf16", seed=1, draft=draft)
    return {draft: verify(folder / draft) for draft in ("none", "mtp", "dspark")}


MISFITS: dict[str, tuple[str, str, dict[str, Any], str, str]] = {
    "EAGLE without a draft": ("none", "cpu", EAGLE, "EAGLE", "with an MTP draft, found none; leave the flag out"),
    "EAGLE on DSpark": (
        "dspark",
        "cpu",
        EAGLE,
        "EAGLE",
        "with an MTP draft, found a DSpark draft ('mtp.0.main_proj'); use DSPARK",
    ),
    "DSPARK on MTP": (
        "mtp",
        "cpu",
        DSPARK,
        "DSPARK",
        "with a DSpark draft, found an MTP draft ('mtp.0.e_proj'); use EAGLE or NEXTN",
    ),
}


@pytest.mark.parametrize("name", MISFITS)
def test_drafts_that_a_server_has_not(name: str, checkpoints: dict[str, Verified]) -> None:
    draft, target, given, algorithm, message = MISFITS[name]
    verified = checkpoints[draft]
    with pytest.raises(Nvfp4SglError) as error:
        checks.check_draft(NOTHING | given | {"model_path": verified.inventory.directory}, verified, target, {})
    assert str(error.value).startswith(f"--speculative-algorithm {algorithm}") and message in str(error.value)


def test_a_target_that_does_not_draft(checkpoints: dict[str, Verified], monkeypatch: pytest.MonkeyPatch) -> None:
    """One that a package adds, say."""
    monkeypatch.setattr(checks, "targets", lambda: (CPU, replace(SM100, drafts=False)))
    verified = checkpoints["mtp"]
    given = NOTHING | EAGLE | {"model_path": verified.inventory.directory}
    with pytest.raises(UnsupportedError, match="^--speculative-algorithm EAGLE: .* target sm_100a, only on cpu;"):
        checks.check_draft(given, verified, "sm_100a", {})


def test_a_draft_that_a_mode_does_not_run(checkpoints: dict[str, Verified]) -> None:
    """BF16 experts, which Hopper runs, but not with activations in NVFP4."""
    verified = checkpoints["mtp"]
    given = NOTHING | EAGLE | {"model_path": str(verified.inventory.directory)}
    checks.check_draft(given, verified, "sm_90a", {})
    message = r"^target sm_90a, activation_mode w4a4: MTP draft: \d+ of \d+ matrices .*'mtp\.0\.ffn\.experts"
    with pytest.raises(UnsupportedError, match=message):
        checks.check_draft(given, verified, "sm_90a", {"activation_mode": "w4a4"})


def test_dspark_on_hopper(checkpoints: dict[str, Verified]) -> None:
    """And a target that drafts, but computes no blocks."""
    verified = checkpoints["dspark"]
    given = NOTHING | DSPARK | {"model_path": str(verified.inventory.directory)}
    checks.check_draft(given, verified, "sm_90a", {})
    without = tuple(replace(each, drafts_blocks=each.name == "cpu") for each in TARGETS)
    message = "^--speculative-algorithm DSPARK: not implemented on target sm_90a, only on cpu; leave"
    with mock.patch.object(dspark_checks, "targets", lambda: without), pytest.raises(UnsupportedError, match=message):
        checks.check_draft(given, verified, "sm_90a", {})


def test_rows_of_another_block(checkpoints: dict[str, Verified]) -> None:
    verified = checkpoints["dspark"]
    given = NOTHING | DSPARK | {"model_path": verified.inventory.directory, "speculative_num_draft_tokens": 5}
    with pytest.raises(ConfigError, match="^--speculative-num-draft-tokens 5: expected 6, .*block-size 4$"):
        checks.check_draft(given, verified, "cpu", {})
    for rows in (0, 1, 11):  # no block has so many tokens and one
        given["speculative_num_draft_tokens"] = rows
        with pytest.raises(ConfigError, match=f"^--speculative-num-draft-tokens {rows}: expected 6, .* leave it out$"):
            checks.check_draft(given, verified, "cpu", {})


def test_a_draft_of_another_model(checkpoints: dict[str, Verified]) -> None:
    verified = checkpoints["mtp"]
    own, other = (str(checkpoints[draft].inventory.directory) for draft in ("mtp", "none"))
    given = NOTHING | EAGLE | {"model_path": own}
    checks.check_draft(given | {"speculative_draft_model_path": own + "/."}, verified, "cpu", {})
    with pytest.raises(ConfigError, match=f"^--speculative-draft-model-path {other}: expected --model-path, {own}"):
        checks.check_draft(given | {"speculative_draft_model_path": other}, verified, "cpu", {})


def test_weights_that_are_converted_at_load(checkpoints: dict[str, Verified]) -> None:
    """The draft as it is stored or converted, too; a word without an effect is refused."""
    given = NOTHING | EAGLE | {"model_path": str(checkpoints["mtp"].inventory.directory)}
    for words in ("experts", "all,drafts"):
        converted = converted_at_load(checkpoints["mtp"], parse_at_load(words))
        checks.check_draft(given, converted, "cpu", {"convert_at_load": words})
    with pytest.raises(ConfigError, match="^convert_at_load: 'drafts': expected --speculative-algorithm"):
        checks.check_draft(NOTHING, converted, "cpu", {"convert_at_load": "all,drafts"})


def test_random_weights(checkpoints: dict[str, Verified]) -> None:
    """Of the kind of draft that config.json describes."""
    found = {"none": "none", "dspark": "a DSpark draft"}
    for draft, verified in checkpoints.items():
        directory = verified.inventory.directory
        given, dummy = NOTHING | EAGLE | {"model_path": str(directory)}, verify_dummy(directory)
        if draft == "mtp":
            checks.check_draft(given, dummy, "cpu", {})
        else:
            with pytest.raises(ConfigError, match=f"with an MTP draft, found {found[draft]}"):
                checks.check_draft(given, dummy, "cpu", {})


def test_a_draft_that_is_incomplete(tmp_path: Path) -> None:
    write_tiny(tmp_path, "bf16", seed=1, draft="mtp")
    remove(tmp_path, "mtp.0.hnorm.weight")
    with pytest.raises(CheckpointError, match=r"'mtp\.0\.hnorm\.weight' is missing"):
        checks.check_draft(NOTHING | EAGLE | {"model_path": str(tmp_path)}, verify(tmp_path), "cpu", {})
