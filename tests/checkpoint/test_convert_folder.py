"""A conversion's directory: killed and resumed, refused while unfinished, and never mixed with anything else."""

from __future__ import annotations

import fcntl
import io
import json
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import pytest
import torch

from nvfp4_sgl import cli
from nvfp4_sgl.checkpoint import checksums
from nvfp4_sgl.checkpoint.verified import verify
from nvfp4_sgl.convert import progress, run, shard
from nvfp4_sgl.convert.options import Options, Scales
from nvfp4_sgl.convert.plan import Shard
from nvfp4_sgl.convert.progress import Progress
from nvfp4_sgl.convert.run import convert
from nvfp4_sgl.errors import CheckpointError, ConfigError
from nvfp4_sgl.files import UNFINISHED
from nvfp4_sgl.serving.arguments import preflight
from nvfp4_sgl.synthetic.tiny import write_tiny
from tests.packaging.checkout import ROOT
from tests.support.damage import change_tensor, copy_checkpoint, replace_bytes, set_byte

SIZES: dict[str, Any] = {"num_hidden_layers": 3, "n_routed_experts": 7}
OPTIONS = Options(shard_size=1_500_000)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("folder") / "deepseek"
    write_tiny(directory, "deepseek", seed=5, **SIZES)
    return directory


@pytest.fixture(scope="module")
def finished(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory that a conversion has filled."""
    target = tmp_path_factory.mktemp("finished") / "to"
    convert_here(source, target)
    return target


def convert_here(source: Path, target: Path, options: Options = OPTIONS) -> None:
    convert(source, target, options, device=torch.device("cpu"), jobs=2)


def contents(directory: Path) -> dict[str, bytes]:
    return {str(f.relative_to(directory)): f.read_bytes() for f in directory.rglob("*") if f.is_file()}


class Died(BaseException):
    """In place of a kill."""


@pytest.fixture
def unfinished(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A conversion that ended before its last files."""
    target = tmp_path / "unfinished"

    def die(*args: object) -> None:
        raise Died

    with monkeypatch.context() as patch:
        patch.setattr(run, "_publish", die)
        with pytest.raises(Died):
            convert_here(source, target)
    yield target


def test_killed_at_any_moment_and_resumed_the_bytes_are_the_same(source: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.support.killed_conversion", str(source), str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    deaths = {int(moment): is_checkpoint for moment, is_checkpoint in said["deaths"].items()}
    assert said["events"] > 400 and len(deaths) >= 16 and said["runs"] >= 3
    # A checkpoint from the moment on that config.json is there, and not before.
    states = [deaths[moment] for moment in sorted(deaths)]
    assert states == sorted(states) and states[0] is False and states[-1] is True


def test_an_unfinished_conversion_is_refused_and_says_what_to_do(
    unfinished: Path, source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in (
        ["inspect", str(unfinished)],
        ["doctor", str(unfinished)],
        ["convert", str(unfinished), str(unfinished.parent / "x")],
    ):
        assert cli.main(command) == 2
        err = capsys.readouterr().err
        assert "an unfinished conversion" in err and "run the same 'nvfp4-sgl convert' command again" in err

    class Arguments:
        _raw_input: ClassVar = {"model_path": str(unfinished)}

    with pytest.raises(ConfigError, match="an unfinished conversion"):
        preflight(Arguments())
    convert_here(source, unfinished)
    verify(unfinished)


def test_files_that_are_whole_are_not_written_again(
    unfinished: Path, source: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    files = sorted(unfinished.glob("*.safetensors"))
    assert len(files) > 3
    files[1].unlink()
    written: list[str] = []
    write = shard.ShardWriter.write

    def told(self: shard.ShardWriter, planned: Shard) -> None:
        written.append(planned.file)
        write(self, planned)

    monkeypatch.setattr(shard.ShardWriter, "write", told)
    convert_here(source, unfinished)
    assert written == [files[1].name]
    assert f"{len(files) - 1} of {len(files)} files are there already" in capsys.readouterr().out
    assert not (unfinished / UNFINISHED).exists()


def flip_a_bit(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-1000] ^= 1
    replace_bytes(file, bytes(data))


DAMAGES: dict[str, Callable[[Path], None]] = {
    "cut": lambda file: replace_bytes(file, file.read_bytes()[:-1]),
    "one bit flipped": flip_a_bit,
    "another header": lambda file: replace_bytes(file, file.read_bytes().replace(b'"pt"', b'"np"', 1)),
    "empty": lambda file: replace_bytes(file, b""),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_file_that_is_damaged_before_the_conversion_goes_on_is_written_again(
    damage: str, unfinished: Path, source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = sorted(unfinished.glob("*.safetensors"))
    before = contents(unfinished)
    DAMAGES[damage](files[1])
    assert contents(unfinished) != before
    convert_here(source, unfinished)
    out = capsys.readouterr().out
    assert f"reading {len(files)} files that are there" in out and "writing 1 files" in out
    assert f"{files[1]}: not what was written there; it is written again" in out
    assert contents(unfinished)[files[1].name] == before[files[1].name]
    assert checksums.check(verify(unfinished).inventory) == []


@pytest.mark.parametrize("damage", [*DAMAGES, "removed"])
def test_a_damaged_file_of_a_finished_conversion_is_written_again(
    damage: str, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "to"
    convert_here(source, target)
    before = contents(target)
    file = sorted(target.glob("*.safetensors"))[2]
    DAMAGES.get(damage, Path.unlink)(file)
    if damage in ("cut", "empty", "removed"):
        assert cli.main(["inspect", str(target)]) == 2
        assert "run the same 'nvfp4-sgl convert' command again" in capsys.readouterr().err
    capsys.readouterr()
    convert_here(source, target)
    out = capsys.readouterr().out
    assert f"{target}: wrote 1 damaged files again; the others are whole" in out and "converted already" not in out
    assert contents(target) == before


def test_a_damaged_file_that_does_not_become_what_it_was_is_said(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where another kind of device rounds otherwise."""
    target = tmp_path / "to"
    convert_here(source, target)
    manifest = json.loads((target / checksums.FILE).read_text())
    name = next(iter(manifest["tensors"]))
    manifest["tensors"][name] = "0" * 64
    (target / checksums.FILE).write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match=rf"tensor '{name}': expected the SHA-256 of .*; remove the directory"):
        convert_here(source, target)


def test_verify_holds_a_conversion_against_its_checksums(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A block scale with one bit flipped is as good a scale as the right one."""
    target = tmp_path / "to"
    convert_here(source, target)
    assert cli.main(["verify", str(target)]) == 0
    assert "checksums: all tensors match nvfp4_sgl_manifest.json" in capsys.readouterr().out
    change_tensor(
        target,
        "layers.1.ffn.experts.3.w2.weight_scale",
        lambda dtype, shape, data: (dtype, shape, bytes([data[0] ^ 1]) + data[1:]),
    )
    for command in (["verify", str(target)], ["verify", str(target), "--against", str(source)]):
        assert cli.main(command) == 1
        out = capsys.readouterr().out
        assert "problem: 'layers.1.ffn.experts.3.w2.weight_scale' in" in out and "expected SHA-256" in out
    (target / checksums.FILE).unlink()
    assert cli.main(["verify", str(target)]) == 0
    assert "there is no nvfp4_sgl_manifest.json" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (Options(shard_size=1_500_000, scales=Scales.MSE), "made with --scales max, given mse"),
        (Options(shard_size=1_500_000, tie_gate_up=True), "made with --tie-gate-up off, given on"),
        (Options(shard_size=2_000_000), "made with --shard-size 1500000, given 2000000"),
        (Options(shard_size=1_500_000, classes=frozenset()), ""),
    ],
)
def test_other_options_are_refused(options: Options, message: str, unfinished: Path, source: Path) -> None:
    with pytest.raises((CheckpointError, ConfigError), match=message or "no matrix would be NVFP4"):
        convert_here(source, unfinished, options)


def test_another_source_is_refused_and_the_same_one_elsewhere_is_not(
    unfinished: Path, source: Path, tmp_path: Path
) -> None:
    other = copy_checkpoint(source, tmp_path / "other")
    file = sorted(other.glob("*.safetensors"))[1]
    data = file.read_bytes()
    replace_bytes(file, data[:-1] + bytes([data[-1] ^ 1]))  # sizes and headers are the same
    with pytest.raises(CheckpointError, match=rf"another kind: made from {source}.* as it was then, given {other}"):
        convert_here(other, unfinished)
    convert_here(source, tmp_path / "whole")
    moved = shutil.copytree(source, tmp_path / "moved")
    convert_here(moved, unfinished)
    assert contents(unfinished) == contents(tmp_path / "whole")


def test_another_version_of_this_package_does_not_go_on(
    unfinished: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "__version__", "99")
    with pytest.raises(CheckpointError, match="made by version .* of nvfp4-sgl, this is 99"):
        convert_here(source, unfinished)


def test_a_finished_conversion_is_left_alone(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "to"
    convert_here(source, target)
    before = {file: file.stat().st_mtime_ns for file in target.iterdir()}
    convert_here(source, target)
    assert "converted already" in capsys.readouterr().out
    assert {file: file.stat().st_mtime_ns for file in target.iterdir()} == before


@pytest.mark.parametrize(
    ("options", "made_with"),
    [
        (["--shard-size", "1MB"], "--shard-size 1500000, given 1000000"),
        (["--scales", "mse"], "--scales max, given mse"),
        (["--tie-gate-up"], "--tie-gate-up off, given on"),
        (["--only", "experts,q"], "--only all classes, given experts,q"),
        (["--drafts", "nvfp4"], "--drafts keep, given nvfp4"),
    ],
)
@pytest.mark.parametrize("dry", [(), ("--dry-run",)], ids=("write", "dry"))
def test_a_finished_conversion_names_the_option_that_is_another(
    options: list[str],
    made_with: str,
    dry: tuple[str, ...],
    source: Path,
    finished: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Whether or not something would be written, nothing is said of what would not happen."""
    before = {file: file.stat().st_mtime_ns for file in finished.iterdir()}
    given = options if "--shard-size" in options else [*options, "--shard-size", "1.5MB"]
    assert cli.main(["convert", str(source), str(finished), *given, *dry]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert f"{finished}: holds a finished conversion of another kind: made with {made_with}; name another" in err
    assert {file: file.stat().st_mtime_ns for file in finished.iterdir()} == before


def test_two_processes_do_not_convert_into_one_directory(unfinished: Path, source: Path) -> None:
    with (unfinished / UNFINISHED / "lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(CheckpointError, match="another process is converting into it"):
            convert_here(source, unfinished)
    convert_here(source, unfinished)


def test_nothing_else_is_ever_overwritten(source: Path, tmp_path: Path) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "thesis.tex").write_text("precious")
    with pytest.raises(CheckpointError, match="not empty"):
        convert_here(source, tmp_path / "thesis")
    with pytest.raises(CheckpointError, match="expected a directory, found a file"):
        convert_here(source, tmp_path / "thesis" / "thesis.tex")
    assert contents(tmp_path / "thesis") == {"thesis.tex": b"precious"}


def test_source_and_target_must_be_apart(source: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(source)
    for target in (source, source / "inner", source.parent, tmp_path / "link"):
        with pytest.raises(ConfigError, match="expected a directory apart from the source"):
            convert_here(source, target)


def test_too_little_room_is_found_beforehand(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Usage(NamedTuple):
        free: int = 3_000_000

    monkeypatch.setattr(run.shutil, "disk_usage", lambda path: Usage())
    with pytest.raises(CheckpointError, match=r"expected 0\.07 GB of free disk space, found 0\.00 GB; make room"):
        convert_here(source, tmp_path / "to")
    assert not list((tmp_path / "to").glob("*.safetensors"))


def test_a_full_disk_ends_in_one_line_and_the_next_run_goes_on(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A limit on the size of files stands for the disk."""
    target, command = tmp_path / "to", ["--device", "cpu", "--shard-size", "1.5MB", "--jobs", "2"]
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, hard))
    try:
        assert cli.main(["convert", str(source), str(target), *command]) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    err = capsys.readouterr().err
    assert "cannot be written (File too large); make room" in err and "again" in err and err.count("\n") == 1
    assert not (target / "config.json").exists() and not list((target / UNFINISHED).glob("*.tmp"))
    assert cli.main(["convert", str(source), str(target), *command]) == 0
    convert_here(source, tmp_path / "whole")
    assert contents(target) == contents(tmp_path / "whole")


def test_a_damaged_source_is_named_and_nothing_is_published(source: Path, tmp_path: Path) -> None:
    for name, position in (("layers.1.attn.wq_b.weight", 77), ("layers.1.attn_norm.weight", 1)):
        damaged = copy_checkpoint(source, tmp_path / name)
        change_tensor(damaged, name, set_byte(position, 0x7F))
        if name.endswith("norm.weight"):
            change_tensor(damaged, name, set_byte(position - 1, 0xFF))
        with pytest.raises(CheckpointError, match=rf"tensor '{name}' in .*expected (no NaN|finite)"):
            convert_here(damaged, tmp_path / f"{name}-to")
        assert not (tmp_path / f"{name}-to" / "config.json").exists()


def test_an_interrupt_says_how_to_go_on(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(run, "wait", interrupted)
        assert cli.main(["convert", str(source), str(tmp_path / "to"), "--shard-size", "1.5MB"]) == 130
    assert capsys.readouterr().err.endswith("stopped; run the same command again to go on\n")
    assert not (tmp_path / "to" / "config.json").exists()
    convert_here(source, tmp_path / "to")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_one_line_on_a_terminal_and_a_line_now_and_then_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    terminal, file = Terminal(), io.StringIO()
    reports = [Progress(1000, terminal), Progress(1000, file)]
    for _ in range(100):
        now[0] += 1
        for report in reports:
            report.advance(9, 10**9)
    for report in reports:
        report.end()
    printed = terminal.getvalue()
    assert printed.count("\n") == 1 and printed.count("\r") == 100 and max(map(len, printed.split("\r"))) <= 80
    assert " 90.0%  100.00 GB written in 1:40, about 0:11 left" in printed
    assert file.getvalue().splitlines() == [
        " 27.0%  30.00 GB written in 0:30, about 1:21 left",
        " 54.0%  60.00 GB written in 1:00, about 0:51 left",
        " 81.0%  90.00 GB written in 1:30, about 0:21 left",
    ]


@pytest.mark.parametrize("length", [2**62, 2**63 - 1, 2**64 - 1])
def test_a_header_longer_than_its_file_is_named(length: int, source: Path, tmp_path: Path, capsys: Any) -> None:
    """Not as a traceback, from memory that there is not."""
    damaged = copy_checkpoint(source, tmp_path / "damaged")
    file = sorted(damaged.glob("*.safetensors"))[0]
    replace_bytes(file, length.to_bytes(8, "little") + file.read_bytes()[8:])
    assert cli.main(["convert", str(damaged), str(tmp_path / "to")]) == 2
    assert f"{file}: truncated: expected at least {length + 8} bytes" in capsys.readouterr().err
