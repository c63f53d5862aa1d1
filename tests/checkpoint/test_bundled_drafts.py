"""Drafts under ``mtp.``: told apart, read strictly, complete in every format that bundles them, left out by servers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from nvfp4_sgl import cli, doctor
from nvfp4_sgl.checkpoint import modelopt_words
from nvfp4_sgl.checkpoint.drafts import DraftKind, draft_kind, verify_draft
from nvfp4_sgl.checkpoint.interchange import differences
from nvfp4_sgl.checkpoint.scan import scan
from nvfp4_sgl.checkpoint.storage import Storage
from nvfp4_sgl.checkpoint.verified import Verified, verify
from nvfp4_sgl.draft_config import DsparkConfig
from nvfp4_sgl.errors import CheckpointError, ConfigError
from nvfp4_sgl.memory.plan import ServerFlags
from nvfp4_sgl.memory.weights import draft_weight_bytes
from nvfp4_sgl.model.contract import Context
from nvfp4_sgl.model.dspark import DsparkDraft
from nvfp4_sgl.model.mtp import MtpDraft
from nvfp4_sgl.reports.inspection import inspect
from nvfp4_sgl.reports.verification import Verification
from nvfp4_sgl.reports.verification import verify_checkpoint as verify_values
from nvfp4_sgl.synthetic.random_weights import verify_dummy
from nvfp4_sgl.synthetic.tiny import write_tiny
from nvfp4_sgl.synthetic.tiny_config import TinyDraft, TinyFormat, tiny_config
from nvfp4_sgl.targets import reference
from nvfp4_sgl.weights.parallel import Ownership
from tests.support.damage import change_json, change_tensor, copy_checkpoint, remove, set_byte
from tests.support.held import held_bytes

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
    bundled = found(verified)
    assert bundled.kind is KINDS[draft]
    assert inspect(verified).as_json()["draft"]["complete"] is True
    context = Context(verified.reader(), verified.config, reference.boundaries())
    made: nn.Module
    with torch.no_grad():  # every tensor that the reference reads is there
        if draft is TinyDraft.MTP:
            made = MtpDraft(context)
        else:
            made = DsparkDraft(context, DsparkConfig.parse(verified.raw, verified.config))
    assert held_bytes(made) == draft_weight_bytes(verified.config, bundled, "cpu", Ownership())


@pytest.mark.parametrize("format", [TinyFormat.NVFP4_FULL, TinyFormat.NVFP4_EXPERTS, TinyFormat.DEEPSEEK])
@pytest.mark.parametrize("draft", KINDS)
def test_random_drafts_are_stored_as_their_exporter_stores_them(
    format: TinyFormat, draft: TinyDraft, written: Any, tmp_path: Path
) -> None:
    """And beside a decoder of NVFP4 alone as in DeepSeek's releases, if the words are DeepSeek's."""
    path = copy_checkpoint(written(format, draft), tmp_path / "copy")
    stored, drawn = found(verify(path)), verify_dummy(path).draft()
    assert drawn is not None and drawn.storages == stored.storages and drawn.nbytes == stored.nbytes
    if format is not TinyFormat.NVFP4_FULL:
        return
    change_json(path / "config.json", lambda config: config["quantization_config"].update(modelopt_words.FP8_BLOCKS))
    dummy, released = verify_dummy(path), found(verify(written(TinyFormat.DEEPSEEK, draft)))
    drawn = dummy.draft()
    assert drawn is not None and drawn.storages == released.storages and drawn.nbytes == released.nbytes
    assert {*dummy.summary.storages.values()} == {Storage.NVFP4}
    context = Context(dummy.draft_reader(), dummy.config, reference.boundaries())
    made: nn.Module
    with torch.no_grad():
        if draft is TinyDraft.MTP:
            made = MtpDraft(context)
        else:
            made = DsparkDraft(context, DsparkConfig.parse(dummy.raw, dummy.config))
    assert held_bytes(made) == draft_weight_bytes(dummy.config, drawn, "cpu", Ownership())


SAID: dict[TinyDraft, tuple[str, dict[str, Any]]] = {
    TinyDraft.MTP: (
        "MTP, one block: 47 tensors, 3.37 MB; matrices: 28 in plain; for --speculative-algorithm EAGLE",
        {"algorithm": "EAGLE", "stages": 1, "block": None, "not_read": []},
    ),
    TinyDraft.DSPARK: (
        "DSpark, 3 stages, blocks of 5 tokens: 126 tensors, 9.70 MB; matrices: 79 in plain"
        "; not read: mtp.2.confidence_head.proj.weight; for --speculative-algorithm DSPARK",
        {"algorithm": "DSPARK", "stages": 3, "block": 5, "not_read": ["mtp.2.confidence_head.proj.weight"]},
    ),
}


@pytest.mark.parametrize("draft", KINDS)
def test_what_is_bundled_is_said(draft: TinyDraft, written: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """By ``inspect``, ``verify`` and ``doctor``, with the flag that drafts with it."""
    monkeypatch.setattr("nvfp4_sgl.targets.choose.detect_target", lambda: "cpu")
    words, fields = SAID[draft]
    path = written(TinyFormat.NVFP4_FULL, draft)
    report = inspect(verify(path))
    assert f"draft            {words}" in report.lines()
    assert report.as_json()["draft"].items() >= fields.items()
    assert f"draft            {words}" in Verification(path, None, report).lines()
    told = doctor.examine(path)
    assert not told.problems and told.draft == words and f"draft: {words}" in doctor.render(told)
    unasked, memory = told.memory, doctor.examine(path, ServerFlags(algorithm=fields["algorithm"])).memory
    assert unasked and memory and "draft" not in unasked["weights"] and unasked["setting"]["draft"] is None
    asked = memory["setting"]
    assert (asked["draft"], asked["round_tokens"]) == (KINDS[draft], (fields["block"] or 3) + 1)
    verified = verify(path)
    bundled = found(verified)
    assert memory["weights"]["draft"] == draft_weight_bytes(verified.config, bundled, "cpu", Ownership())
    assert memory["token"]["ratio-4 states"] == 2 * unasked["token"]["ratio-4 states"] and memory["token"]["draft"] > 0
    assert 1.9 < memory["server"]["ratio-128 states"] / unasked["server"]["ratio-128 states"] <= 2


def test_a_block_of_another_size_is_counted(
    written: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By ``doctor --speculative-dspark-block-size``, as a server drafts with it."""
    monkeypatch.setattr("nvfp4_sgl.targets.choose.detect_target", lambda: "cpu")
    path, flag = str(written(TinyFormat.NVFP4_FULL, TinyDraft.DSPARK)), "--speculative-dspark-block-size"
    drafted = ["doctor", path, "--json", "--speculative-algorithm", "dspark"]
    for given, tokens in (([], 6), ([flag, "2"], 3), ([flag, "9"], 10)):
        assert cli.main([*drafted, *given]) in (0, 1)  # whatever else this machine lacks
        assert json.loads(capsys.readouterr().out)["memory"]["setting"]["round_tokens"] == tokens
    (problem,) = doctor.examine(Path(path), ServerFlags(block=2)).problems
    assert problem == f"draft: {flag} 2: expected --speculative-algorithm, too; add it"
    (problem,) = doctor.examine(Path(path), ServerFlags(algorithm="EAGLE", block=2)).problems
    assert problem.startswith(f"draft: {flag} 2: expected --speculative-algorithm DSPARK, found EAGLE")


def test_a_draft_that_a_planned_server_has_not(written: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nvfp4_sgl.targets.choose.detect_target", lambda: "cpu")
    path = written(TinyFormat.NVFP4_FULL, TinyDraft.MTP)
    (problem,) = doctor.examine(path, ServerFlags(algorithm="DSPARK")).problems
    assert problem.startswith("draft: --speculative-algorithm DSPARK: expected") and "found an MTP draft" in problem
    (problem,) = doctor.examine(path, ServerFlags(steps=2)).problems
    assert problem == "draft: --speculative-num-steps 2: expected --speculative-algorithm, too; add it"


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
        assert "its decoder is complete, by its headers" in report.lines()[-1]
        assert report.lines()[-1].endswith("; its draft cannot be served, 1 note")
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


CONTRADICTIONS: dict[str, tuple[TinyDraft, dict[str, Any], str]] = {
    "seven blocks of MTP": (TinyDraft.MTP, {"num_nextn_predict_layers": 7}, "expected 1 with draft mtp, .*found 7"),
    "none": (TinyDraft.MTP, {"num_nextn_predict_layers": 0}, "expected 1 with draft mtp, .*found 0"),
    "one of none": (TinyDraft.NONE, {"num_nextn_predict_layers": 1}, "expected 0 with draft none, .*found 1"),
    "layers": (TinyDraft.NONE, {"num_hidden_layers": 1, "compress_ratios": [0, 0]}, r"expected \[0\] with draft none"),
    "stages": (TinyDraft.DSPARK, {"num_hidden_layers": 1, "compress_ratios": [0, 4]}, r"expected \[0, 0, 0, 0\]"),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_fields_that_contradict_a_draft_are_refused(name: str) -> None:
    """What ``--set`` says is written, or refused."""
    draft, overrides, message = CONTRADICTIONS[name]
    with pytest.raises(ConfigError, match=message):
        tiny_config(TinyFormat.BF16, overrides, draft=draft)
    tiny_config(TinyFormat.BF16, {"num_hidden_layers": 1, "compress_ratios": [0]}, draft=draft)


def test_values_of_a_draft_are_scanned(written: Any, tmp_path: Path) -> None:
    """By themselves: the decoder's are right."""
    path = copy_checkpoint(written(TinyFormat.DEEPSEEK, TinyDraft.DSPARK), tmp_path / "copy")
    verified = verify(path)
    assert not scan(verified, draft=verified.draft()).problems
    for name in ("mtp.0.main_proj.weight", "mtp.1.ffn.experts.2.w1.scale", "mtp.2.norm.weight"):
        change_tensor(path, name, set_byte(1, 0xFF))
    verified = verify(path)
    wrong = {problem.tensor for problem in scan(verified, draft=verified.draft()).problems}
    assert wrong >= {"mtp.0.main_proj.weight", "mtp.1.ffn.experts.2.w1.scale", "mtp.2.norm.weight"}
    assert not scan(verified).problems


@pytest.mark.parametrize("flag", ["--values", "--scales"])
def test_wrong_values_of_a_draft_are_said(
    flag: str, written: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By name, as a note: a server that does not draft loads the rest, and one that drafts refuses these."""
    path, name = copy_checkpoint(written(TinyFormat.DEEPSEEK, TinyDraft.MTP), tmp_path / "copy"), "mtp.0.h_proj.scale"
    change_tensor(path, name, set_byte(0, 0xFF))
    assert cli.main(["inspect", str(path), flag, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    (note,) = said["notes"]
    assert not said["problems"] and said["draft"]["complete"] is False
    assert note["kind"] == "draft-not-usable" and note["message"].startswith("draft: values of 1 tensor are wrong")
    assert name in note["message"]
    assert cli.main(["inspect", str(path), flag]) == 0
    verdict = capsys.readouterr().out.splitlines()[-1]
    assert "its decoder is complete, and its" in verdict and verdict.endswith("; its draft cannot be served, 1 note")
    found = verify_values(path)
    assert not found.problems and any(name in line for line in found.lines())
    assert found.lines()[-1].endswith("values; its draft cannot be served")
    with pytest.raises(CheckpointError, match=name):
        MtpDraft(Context(verify(path).draft_reader(), verify(path).config, reference.boundaries()))


@pytest.mark.parametrize("draft", KINDS)
def test_doctor_says_that_it_reads_no_values(draft: TinyDraft, written: Any, tmp_path: Path) -> None:
    """Neither of the decoder nor of the draft; headers of both are checked."""
    path = copy_checkpoint(written(TinyFormat.NVFP4_FULL, draft), tmp_path / "copy")
    change_tensor(path, "mtp.0.attn_norm.weight", set_byte(1, 0xFF))
    asked = ServerFlags(target="cpu", algorithm=KINDS[draft].algorithm)
    told = doctor.examine(path, asked)
    line = f"not checked: values of tensors, the draft's included; nvfp4-sgl verify {path} reads them"
    assert line in doctor.render(told) and not any("draft" in problem for problem in told.problems)
    assert verify_values(path).lines()[-1].endswith("its draft cannot be served")
    remove(path, "mtp.0.attn_norm.weight")
    assert any("mtp.0.attn_norm.weight" in problem for problem in doctor.examine(path, asked).problems)
    told = doctor.examine(path, ServerFlags(target="cpu"))
    assert "mtp.0.attn_norm.weight" in told.draft and line in doctor.render(told)
    told = doctor.examine(written(TinyFormat.NVFP4_FULL, TinyDraft.NONE))
    assert told.not_checked.startswith("values of tensors; ")


UNLIKE_MTP: dict[str, tuple[dict[str, Any], str]] = {
    "blocks": ({"num_nextn_predict_layers": 2}, "'num_nextn_predict_layers': expected 1, .* found 2"),
    "compressed": ({"compress_ratios": [0, 4, 128, 4]}, r"'compress_ratios': expected 3 entries, and a 0 .*128, 4\]"),
}


@pytest.mark.parametrize("name", UNLIKE_MTP)
def test_fields_that_say_another_mtp_draft(name: str, written: Any, tmp_path: Path) -> None:
    """Fields that tell of other blocks than are stored: nothing drafts with them, and the decoder still serves."""
    fields, message = UNLIKE_MTP[name]
    path = copy_checkpoint(written(TinyFormat.NVFP4_FULL, TinyDraft.MTP), tmp_path / "copy")
    change_json(path / "config.json", lambda config: config.update(fields))
    message = rf"{path}/config.json: field {message}"
    with pytest.raises(ConfigError, match=message):
        found(verify(path))
    report = inspect(verify(path))
    assert not report.problems and [note.kind for note in report.notes] == ["draft-not-usable"]
    (path / "model.safetensors.index.json").unlink()
    for file in path.glob("*.safetensors"):
        file.unlink()
    with pytest.raises(ConfigError, match=message):
        verify_dummy(path).draft()


def test_fields_of_dspark_beside_an_mtp_draft(written: Any, tmp_path: Path) -> None:
    """They may be meant for other tensors: nothing drafts, and the decoder still serves."""
    path = copy_checkpoint(written(TinyFormat.NVFP4_FULL, TinyDraft.MTP), tmp_path / "copy")
    change_json(path / "config.json", lambda config: config.update(dspark_block_size=5))
    with pytest.raises(ConfigError, match=rf"{path}/config.json: field 'dspark_block_size': .* an MTP draft .*found 5"):
        found(verify(path))
    report = inspect(verify(path))
    assert not report.problems and [note.kind for note in report.notes] == ["draft-not-usable"]


def test_drafts_that_cannot_replace_each_other(written: Any, tmp_path: Path) -> None:
    """Where one is served; otherwise they do not count."""
    mtp, dspark, none = (verify(written(TinyFormat.NVFP4_FULL, draft)) for draft in (*KINDS, TinyDraft.NONE))
    assert not differences(mtp, mtp, drafted=True) and not differences(mtp, none)
    assert differences(mtp, none, drafted=True) == ["draft: served MTP, found none"]
    assert differences(mtp, dspark, drafted=True)[0] == "draft: served MTP, found DSpark"
    path = copy_checkpoint(written(TinyFormat.NVFP4_FULL, TinyDraft.DSPARK), tmp_path / "copy")
    change_json(path / "config.json", lambda config: config.update(dspark_noise_token_id=3))
    assert differences(dspark, verify(path), drafted=True) == [
        "config.json: field 'dspark_noise_token_id': served 2, found 3"
    ]
