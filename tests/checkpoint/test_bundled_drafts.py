"""Drafts under ``mtp.``: told apart, read strictly, complete in every format that bundles them, left out by servers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from nvfp4_sgl import cli
from nvfp4_sgl.checkpoint.drafts import DraftKind, draft_kind, verify_draft
from nvfp4_sgl.checkpoint.verified import Verified, verify
from nvfp4_sgl.draft_config import DsparkConfig
from nvfp4_sgl.errors import CheckpointError, ConfigError
from nvfp4_sgl.model.contract import Context
from nvfp4_sgl.model.dspark import DsparkDraft
from nvfp4_sgl.model.mtp import MtpDraft
from nvfp4_sgl.reports.inspection import inspect
from nvfp4_sgl.synthetic.tiny import write_tiny
from nvfp4_sgl.synthetic.tiny_config import TinyDraft, TinyFormat
from nvfp4_sgl.targets import reference
from tests.support.damage import change_json, copy_checkpoint

BUNDLING = [format for format in TinyFormat if format is not TinyFormat.COMPRESSED_TENSORS]
SIZES: dict[str, Any] = {"num_hidden_layers": 3, "n_routed_experts": 6}
KINDS = {TinyDraft.MTP: DraftKind.MTP, TinyDraft.DSPARK: DraftKind.DSPARK}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[TinyFormat, TinyDraft], Path]:
    made: dict[tuple[TinyFormat, TinyDraft], Path] = {}

    def get(format: TinyFormat, draft: TinyDraft) -> Path:
        if (format, draft) not in made:
            path: Path = tmp_path_factory.mktemp("tiny")
            write_tiny(path, format, seed=3, draft=draft, **SIZES)
            made[format, draft] = path
        return made[format, draft]

    return get


def found(verified: Verified) -> Any:
    return verify_draft(verified.inventory, verified.raw, verified.config)


@pytest.mark.parametrize("format", BUNDLING)
@pytest.mark.parametrize("draft", KINDS)
def test_a_draft_is_complete_in_every_format(format: TinyFormat, draft: TinyDraft, written: Any) -> None:
    verified = verify(written(format, draft))
    assert found(verified).kind is KINDS[draft]
    assert inspect(verified).as_json()["draft"]["complete"] is True
    context = Context(verified.reader(), verified.config, reference.boundaries())
    with torch.no_grad():  # every tensor that the reference reads is there
        if draft is TinyDraft.MTP:
            MtpDraft(context)
        else:
            DsparkDraft(context, DsparkConfig.parse(verified.raw, verified.config))


def test_none_is_bundled(written: Any) -> None:
    verified = verify(written(TinyFormat.NVFP4_FULL, TinyDraft.NONE))
    assert found(verified) is None and draft_kind(verified.inventory) is None
    assert inspect(verified).as_json()["draft"] is None


def without(name: str) -> Callable[[dict[str, Any]], None]:
    def change(entries: dict[str, Any]) -> None:
        del entries[name]

    return change


def renamed(name: str, other: str) -> Callable[[dict[str, Any]], None]:
    def change(entries: dict[str, Any]) -> None:
        entries[other] = entries.pop(name)

    return change


DAMAGES: dict[str, tuple[TinyDraft, Callable[[dict[str, Any]], None], str]] = {
    "missing": (TinyDraft.MTP, without("mtp.0.enorm.weight"), "tensor 'mtp.0.enorm.weight' is missing"),
    "of a stage": (TinyDraft.DSPARK, without("mtp.1.attn.attn_sink"), "tensor 'mtp.1.attn.attn_sink' is missing"),
    "superfluous": (TinyDraft.MTP, renamed("mtp.0.enorm.weight", "mtp.0.new.weight"), "no such tensor in this model"),
    "neither": (TinyDraft.MTP, without("mtp.0.e_proj.weight"), "found neither"),
    "both": (TinyDraft.DSPARK, renamed("mtp.0.main_norm.weight", "mtp.0.e_proj.weight"), "'mtp.0.e_proj' and"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_draft_is_named_and_the_decoder_still_serves(name: str, written: Any) -> None:
    draft, change, message = DAMAGES[name]
    verified = verify(written(TinyFormat.NVFP4_FULL, draft))
    entries = dict(verified.inventory.entries)
    try:
        change(verified.inventory.entries)
        with pytest.raises(CheckpointError, match=message):
            found(verified)
        report = inspect(verified)
        assert not report.problems and [note.kind for note in report.notes] == ["draft-not-usable"]
        assert message in "\n".join(report.lines()) and report.as_json()["draft"]["complete"] is False
    finally:
        verified.inventory.entries.clear()
        verified.inventory.entries.update(entries)


def test_copies_of_embedding_and_head_are_not_read(written: Any) -> None:
    verified = verify(written(TinyFormat.NVFP4_FULL, TinyDraft.MTP))
    verified.inventory.entries["mtp.0.emb.tok_emb.weight"] = verified.inventory.entries["embed.weight"]
    verified.inventory.entries["mtp.0.head.weight"] = verified.inventory.entries["head.weight"]
    assert found(verified).kind is DraftKind.MTP


def test_dspark_without_its_fields_is_refused(written: Any, tmp_path: Path) -> None:
    path = copy_checkpoint(written(TinyFormat.NVFP4_FULL, TinyDraft.DSPARK), tmp_path / "copy")
    change_json(path / "config.json", lambda config: config.pop("dspark_markov_rank"))
    with pytest.raises(ConfigError, match="'dspark_markov_rank': expected an integer"):
        found(verify(path))


def test_the_command_writes_each(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for draft in TinyDraft:
        sizes = [f"--set={name}={value}" for name, value in SIZES.items()]
        command = ["tiny", str(tmp_path / draft.value), "--draft", draft.value, "--no-check", "--json", *sizes]
        assert cli.main(command) == 0
        assert json.loads(capsys.readouterr().out)["draft"] == draft.value
        assert draft_kind(verify(tmp_path / draft.value).inventory) is KINDS.get(draft)
    assert cli.main(["tiny", str(tmp_path / "unasked"), "--no-check", "--json", *sizes]) == 0
    assert json.loads(capsys.readouterr().out)["draft"] == TinyDraft.MTP.value
    refused = ["tiny", str(tmp_path / "other"), "--format", "compressed-tensors", "--draft", "mtp"]
    assert cli.main(refused) == 2 and "draft mtp: expected none" in capsys.readouterr().err
