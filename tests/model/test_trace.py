"""Records of passes, and the first op in which two of them depart."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nvfp4_sgl.cli import main
from nvfp4_sgl.errors import ConfigError
from nvfp4_sgl.ops.modes import ActivationMode
from nvfp4_sgl.serving import trace
from nvfp4_sgl.standalone import Standalone
from nvfp4_sgl.synthetic.tiny import write_tiny
from nvfp4_sgl.tracing import diff, record
from nvfp4_sgl.tracing.contents import RANK_LOCAL
from nvfp4_sgl.tracing.diff import Difference
from nvfp4_sgl.tracing.reading import read_record
from nvfp4_sgl.tracing.record import Recorder, summary
from nvfp4_sgl.tracing.taps import observing
from nvfp4_sgl.tracing.values import selected_set
from tests.support.ranks import Exchange

PROMPT = list(range(5, 45))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    write_tiny(path, "nvfp4-full", seed=3, num_hidden_layers=3)
    return path


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> Standalone:
    return Standalone(checkpoint, requests=1, capacity=64)


def run(
    model: Standalone,
    file: Path,
    passes: int = 8,
    prompt: list[int] = PROMPT,
    decoded: tuple[int, ...] = (7, 9),
    ranks: tuple[int, int] = (0, 1),
    mode: ActivationMode = ActivationMode.W4A16,
) -> Path:
    """Record a prompt and decode steps."""
    about = {"target": "cpu", "mode": mode.value, "rank": ranks[0], "ranks": ranks[1]}
    recorder = Recorder(model.decoder, file, passes, about)
    model.reset()
    for ids in (prompt, *([token] for token in decoded)):
        work = model.begin({0: ids})
        with recorder.recording(work.ids, work.request.positions):
            model.forward(work)
    return file


def planted(model: Standalone, layer: int, change: Callable[[Tensor], Tensor]) -> Any:
    """A mistake in a layer's wo_b, while the handle returned is not removed."""
    block: Any = model.decoder.layers[layer]
    return block.attn.wo_b.register_forward_hook(lambda module, given, output: [change(output[0])])


def differences(one: Path, other: Path) -> Iterator[Difference]:
    return diff.differences(read_record(one), read_record(other))


def first_beyond(one: Path, other: Path, bound: float = 0.1) -> Difference | None:
    return next((each for each in differences(one, other) if each.error > bound), None)


def test_a_run_repeated_is_equal(model: Standalone, tmp_path: Path) -> None:
    found = list(differences(run(model, tmp_path / "a"), run(model, tmp_path / "b")))
    assert found and all(each.equal and each.error == 0 for each in found)
    assert {each.number for each in found} == {0, 1, 2}
    order = [each.name for each in found if each.number == 2]
    assert order[0] == "layers.0.hc_attn.x" and order[-1] == "hc_head.x" and len(order) == len(set(order))
    assert [name for name in order if "layers.1" in name][:2] == ["layers.1.hc_attn.streams", "layers.1.hc_attn.x"]


def test_the_first_op_that_departs_is_named(model: Standalone, tmp_path: Path) -> None:
    right = run(model, tmp_path / "right")
    handle = planted(model, 1, lambda output: output * 1.3)
    wrong = run(model, tmp_path / "wrong")
    handle.remove()
    found = first_beyond(right, wrong)
    assert found is not None and (found.number, found.name) == (0, "layers.1.attn.wo_b")
    # 16 random projections know a difference of 0.3 within about 18 %.
    assert found.error == pytest.approx(0.3, rel=0.6) and not found.equal
    earlier = [each for each in differences(right, wrong) if each.number == 0 and each.name.startswith("layers.0.")]
    assert all(each.equal for each in earlier if not each.name.endswith("left"))
    assert first_beyond(right, run(model, tmp_path / "again")) is None


def test_one_bit_is_seen(model: Standalone, tmp_path: Path) -> None:
    def flip(output: Tensor) -> Tensor:
        changed = output.clone()
        changed.view(torch.int32)[0, 3] ^= 1
        return changed

    right = run(model, tmp_path / "right")
    handle = planted(model, 2, flip)
    wrong = run(model, tmp_path / "wrong")
    handle.remove()
    unequal = next(each for each in differences(right, wrong) if not each.equal)
    assert unequal.name == "layers.2.attn.wo_b" and unequal.error < 1e-6


def test_nan_is_named(model: Standalone, tmp_path: Path) -> None:
    right = run(model, tmp_path / "right")
    handle = planted(model, 0, lambda output: output.masked_fill(output == output.max(), torch.inf))
    found = first_beyond(right, run(model, tmp_path / "wrong"))
    handle.remove()
    assert found is not None and found.name == "layers.0.attn.wo_b" and math.isinf(found.error)
    assert "1 infinite" in found.why


def test_passes_beyond_the_number_are_not_recorded(model: Standalone, tmp_path: Path) -> None:
    lines = run(model, tmp_path / "a", passes=2).read_text().splitlines()
    assert [json.loads(line).get("pass") for line in lines] == [None, 0, 1]


def test_taps_are_gone_afterwards(model: Standalone) -> None:
    seen: list[str] = []
    with pytest.raises(KeyError), observing(model.decoder, lambda name, values: seen.append(name)):
        raise KeyError
    model.reset()
    model.extend({0: PROMPT})
    assert not seen


def test_large_outputs_are_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    """NaN, infinities and amax are those of all values, digest and sketch of evenly spaced rows."""
    values = torch.randn(10, 64, generator=torch.Generator().manual_seed(0))
    values[1, 5], values[3, 7] = torch.nan, 50.0
    monkeypatch.setattr(record, "SAMPLED_VALUES", 320)
    row, digest = summary(values)
    assert row[:3].tolist() == [1, 0, 50]
    other = values.clone()
    other[1::2] = 0
    assert summary(other)[1] == digest and summary(values.roll(1, 0))[1] != digest


def test_the_size_of_a_difference_is_estimated() -> None:
    generator = torch.Generator().manual_seed(1)
    ratios = []
    for _ in range(20):
        values, noise = (torch.randn(50, 33, generator=generator) for _ in range(2))
        (one, _), (other, _) = summary(values), summary(values + 0.05 * noise)
        estimated = (one[4:] - other[4:]).square().mean().sqrt() / values.norm()
        ratios.append(float(estimated) / 0.05)
    assert sum(ratios) / len(ratios) == pytest.approx(1, abs=0.15) and max(ratios) < 2


def test_sets_are_told_apart_in_any_order() -> None:
    slots = torch.randperm(4096, generator=torch.Generator().manual_seed(2))[:512][None]
    shuffled = slots[:, torch.randperm(512)]
    padded = torch.cat([shuffled, torch.full((1, 9), -1)], dim=1)
    assert torch.equal(selected_set(slots), selected_set(padded))
    longer = torch.cat([shuffled, torch.tensor([[3, 4]])], dim=1)
    assert torch.equal(selected_set(slots), selected_set((longer, torch.tensor([512]))))
    other = slots.clone()
    other[:, :51] += 4096
    share = (selected_set(other) - selected_set(slots)).square().sum() / selected_set(slots).square().sum()
    assert 0.05 < float(share) < 0.6  # 2 * 51 / 512 = 0.2


def test_the_command(model: Standalone, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    right = run(model, tmp_path / "right")
    assert main(["trace", str(right), str(right)]) == 0
    assert "no op departs" in capsys.readouterr().out
    handle = planted(model, 1, lambda output: output * 1.001)
    wrong = run(model, tmp_path / "wrong")
    handle.remove()
    assert main(["trace", str(right), str(wrong)]) == 0
    assert main(["trace", str(right), str(wrong), "--exact"]) == 1
    output = capsys.readouterr().out
    assert "first with other bits: pass 0, layers.1.attn.wo_b" in output
    assert main(["trace", str(right), str(wrong), "--bound", "0.0001", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["departs"]["name"] == "layers.1.attn.wo_b"


def test_ranks_hold_their_own_where_they_are_not_compared_and_nowhere_else(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two ranks that run: taken for one and the same rank, they depart at what is left out otherwise."""
    exchange = Exchange(2)
    models = [Standalone(checkpoint, parallel=rank, requests=1, capacity=64) for rank in exchange.ranks]
    files = [tmp_path / f"rank{rank}.jsonl" for rank in range(2)]

    def recorded(rank: int) -> Tensor:
        run(models[rank], files[rank], decoded=(7,), ranks=(rank, 2))
        return torch.empty(0)

    exchange.run(recorded)
    one, other = map(read_record, files)
    found = list(diff.differences(one, replace(other, rank=0)))
    departed = {re.sub(r"^layers\.\d+\.", "", each.name) for each in found if not each.equal}
    assert departed == set(RANK_LOCAL)
    assert main(["trace", *map(str, files), "--exact"]) == 0
    out = capsys.readouterr().out
    assert "left out: attn.project_q, " in out and "A is of rank 0 of 2, B of rank 1 of 2" in out
    assert main(["trace", str(files[1]), str(checkpoint), "--json"]) == 1, "the record's tokens are random"
    report = json.loads(capsys.readouterr().out)
    assert report["left_out"] == list(RANK_LOCAL) and report["departs"] is None and report["stopped"] is None


def test_runs_that_choose_other_tokens_are_compared_up_to_there(
    model: Standalone, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two servers that sampled: pass 1 is fed 7 in both, pass 2 is fed 9 in one and 11 in the other."""
    right = run(model, tmp_path / "a" / "rank0.jsonl")
    other = run(model, tmp_path / "b" / "rank0.jsonl", decoded=(7, 11))
    assert main(["trace", str(right.parent), str(other.parent)]) == 1
    out = capsys.readouterr().out
    assert "pass 0: 40 tokens from position 0: 5 6 7 8 9 10 11 12 …; both chose 7" in out
    assert "pass 1: 1 tokens from position 40: 7; A chose 9, B chose 11" in out
    assert "the first token that departs: pass 1, 9 in A, 11 in B" in out
    assert "pass 2: expected the same tokens" in out and "found token 9 at position 41 in" in out
    assert "ops in 2 passes" in out and "no op departs" in out


def test_two_modes_of_a_checkpoint_are_fed_the_same_tokens(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["trace", str(checkpoint), "--prompt", "30", "--steps", "4", "--json"]
    assert main([*command, "--bound", "10"]) in (0, 1)
    found = json.loads(capsys.readouterr().out)
    assert len(found["passes"]) == 5 and found["departs"] is None
    for one, following in itertools.pairwise(found["passes"]):
        assert following["ids"] == [one["chose"][0]], "B is fed what A has chosen"
    assert any(not op["equal"] for op in found["ops"]), "the modes differ"
    same = main([*command, "--mode", "w4a16"])
    assert same == 0 and all(op["equal"] for op in json.loads(capsys.readouterr().out)["ops"])


def test_between_modes_the_default_bound_leaves_roundings_and_names_a_mistake(
    checkpoint: Path, model: Standalone, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Activations in FP4 move the first product by 0.1 already; a wrong sign is more than that."""
    right = run(model, tmp_path / "right")
    w4a4 = Standalone(checkpoint, requests=1, capacity=64, mode=ActivationMode.W4A4)
    assert main(["trace", str(right), str(run(w4a4, tmp_path / "w4a4", mode=ActivationMode.W4A4)), "--json"]) in (0, 1)
    found = json.loads(capsys.readouterr().out)
    assert found["bound"] == 0.9 and found["departs"] is None
    assert max(op["error"] for op in found["ops"][:12]) > 0.1
    handle = planted(w4a4, 1, torch.neg)
    assert main(["trace", str(right), str(run(w4a4, tmp_path / "wrong", mode=ActivationMode.W4A4)), "--json"]) == 1
    handle.remove()
    assert json.loads(capsys.readouterr().out)["departs"]["name"] == "layers.1.attn.wo_b"
    assert main(["trace", str(right), str(right), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["bound"] == 0.09


def test_progress_goes_to_stderr(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["trace", "--prompt", "4", "--steps", "0"], ["layertest", "--layer", "0", "--prompt", "4"]):
        assert main([command[0], str(checkpoint), *command[1:], "--json"]) in (0, 1)
        said = capsys.readouterr()
        assert json.loads(said.out) and said.err.startswith(f"{command[0]}: importing torch\n")


def test_a_checkpoint_is_fed_a_record_s_tokens(
    model: Standalone, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever it would have chosen itself: the record's tokens are not the likeliest ones."""
    right = run(model, tmp_path / "rank0.jsonl")
    assert main(["trace", str(right.parent), str(checkpoint), "--json"]) in (0, 1)
    found = json.loads(capsys.readouterr().out)
    assert [each["ids"] for each in found["passes"]] == [PROMPT, [7], [9]]
    assert all(op["equal"] for op in found["ops"])
    assert found["passes"][0]["chose"][0] == 7


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["{record}"], "expected B, too"),
        (["{folder}", "{record}"], "expected a folder with rank0.jsonl, or with config.json"),
        (["{record}", "{record}", "--mode", "w4a4"], "--mode w4a4: .* is a record"),
        (["{record}", "{record}", "--first-mode", "w4a4"], "--first-mode w4a4: .* is a record"),
        (["{checkpoint}", "{record}"], "pass the record first"),
    ],
)
def test_what_cannot_be_compared_is_said(
    words: list[str],
    message: str,
    model: Standalone,
    checkpoint: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "empty").mkdir()
    places = {"record": run(model, tmp_path / "a"), "folder": tmp_path / "empty", "checkpoint": checkpoint}
    assert main(["trace", *(word.format_map(places) for word in words)]) == 2
    assert re.search(message, capsys.readouterr().err)


def test_records_of_other_requests_and_no_records_are_refused(model: Standalone, tmp_path: Path) -> None:
    right, other = run(model, tmp_path / "a"), run(model, tmp_path / "b", prompt=PROMPT[::-1])
    with pytest.raises(ConfigError, match="pass 0: expected the same tokens"):
        list(differences(right, other))
    (tmp_path / "c").write_text("{}\n")
    with pytest.raises(ConfigError, match="expected a first line with format 2"):
        list(differences(right, tmp_path / "c"))
    with pytest.raises(ConfigError, match="expected a record of passes"):
        list(differences(tmp_path / "nowhere", right))


def test_a_server_says_what_it_cannot_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace.check_trace()
    monkeypatch.setenv(trace.TRACE, str(tmp_path / "records"))
    monkeypatch.setattr(trace.parallel, "tp_rank", lambda: 1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(trace.settings, "has_no_graphs", lambda: False)
    with pytest.raises(ConfigError, match="add --disable-cuda-graph"):
        trace.check_trace()
    monkeypatch.setattr(trace.settings, "has_no_graphs", lambda: True)
    trace.check_trace()
    file, header = tmp_path / "records" / "rank1.jsonl", '{"format": 2, "rank": 1}\n'
    for left_by_a_failed_start in ("", header):
        file.write_text(left_by_a_failed_start)
        trace.check_trace()
        assert file.read_text() == left_by_a_failed_start
    for taken in (header + '{"pass": 0}\n', "{}\n", "[1]\n", "notes", "\n"):
        file.write_text(taken)
        with pytest.raises(ConfigError, match="rank1.jsonl holds a record"):
            trace.check_trace()
        assert file.read_text() == taken
    monkeypatch.setenv(trace.TRACE, "/dev/null/records")
    with pytest.raises(ConfigError, match="rank1.jsonl cannot be written"):
        trace.check_trace()
    monkeypatch.setenv(trace.TRACE_PASSES, "all")
    with pytest.raises(ConfigError, match="NVFP4_SGL_TRACE_PASSES: expected a number from 1, found 'all'"):
        trace.check_trace()
