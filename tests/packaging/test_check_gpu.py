"""launch/check_gpu: which steps a GPU gets, and that whatever stops first light is told by name."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.packaging.checkout import ROOT

sys.path.append(str(ROOT / "launch"))  # its scripts import each other by bare name

from benchmarks.sm100 import bench
from first_light import gemms, steps
from first_light.journal import Account, Journal
from first_light.outcome import Outcome, run_step
from first_light.steps import PYTEST, Step
from programs import check_gpu, resumable_tests
from programs.resumable_tests import Part

FAULTS = ROOT / "tests" / "support" / "planted_faults"
JOURNAL = "from first_light.journal import Journal; journal = Journal.of_this_process(); "


def emulate(folder: Path, *arguments: str, **environment: str) -> tuple[subprocess.CompletedProcess[str], Any]:
    """``launch/check_gpu --emulated`` and the report that it packed."""
    command = [str(ROOT / "launch" / "check_gpu"), "--emulated", "--output", str(folder), *arguments]
    variables = {**os.environ, "PYTHON": sys.executable, **environment}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as packed:
        names = packed.getnames()
        (report,) = (name for name in names if name.endswith("report.json"))
        content = packed.extractfile(report)
        assert content is not None
        assert {"machine.json", "doctor.json", "report.txt"} <= {name.split("/")[-1] for name in names}
        return done, json.load(content)


def test_the_numeric_part_in_the_emulator(tmp_path: Path):
    done, report = emulate(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("EMULATED: no GPU is used")
    assert [(step["step"], step["verdict"]) for step in report] == [("instructions", "passed"), ("gemms", "passed")]
    assert "all passed" in done.stdout


def test_a_wrong_kernel_is_named(tmp_path: Path):
    """The alphas of the grouped GEMM alone are wrong: the first that departs is the first grouped one."""
    done, (step,) = emulate(tmp_path, "gemms", PYTHONPATH=str(FAULTS), PLANTED_FAULT="alpha")
    assert done.returncode == 1
    assert (step["verdict"], step["item"]) == ("departs", "tiny, TP 1, wo_a, 9 tokens")
    assert step["kernel"].startswith("nvfp4_sm_100a_") and "KernelShape(token_tile=16" in step["key"]
    assert step["tensor"].startswith("output of row") and "found over expected there: 1.2" in step["detail"]
    expected, found = float(step["expected"].split(" ")[0]), float(step["found"])
    assert found == pytest.approx(1.25 * expected, rel=0.01)
    for told in (
        step["item"],
        step["kernel"],
        step["tensor"],
        step["expected"],
        step["found"],
        "Send us this one file",
    ):
        assert told in done.stdout
    assert "Traceback" not in done.stdout


def test_a_wrong_instruction_is_named(tmp_path: Path):
    done, (step,) = emulate(tmp_path, "instructions", PYTHONPATH=str(FAULTS), PLANTED_FAULT="e2m1")
    assert done.returncode == 1
    assert (step["verdict"], step["item"]) == ("departs", "conversions")
    assert step["tensor"].startswith("d32, to E2M1")
    assert "Traceback" not in done.stdout


def run(tmp_path: Path, code: str, seconds: float = 60) -> Outcome:
    return run_step(Step("a step", "", ("-c", JOURNAL + code), seconds), tmp_path / "step")


def test_a_hang_is_named_and_ended(tmp_path: Path):
    code = (
        "import subprocess, sys, time; journal.begin('one'); journal.end('one'); journal.begin('two'); "
        "journal.launch('kernel', 'Key(4)'); "
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True); "
        "print(child.pid, flush=True); time.sleep(600)"
    )
    found = run(tmp_path, code, seconds=5)
    assert (found.verdict, found.item, found.account.ended) == ("out of time", "two", 1)
    text = "\n".join(found.lines())
    assert "OUT OF TIME" in text and "two" in text and "kernel" in text and "Key(4)" in text and "5 s" in text
    child = int((found.folder / "log.txt").read_text())
    assert not Path(f"/proc/{child}").exists() or "Z" in Path(f"/proc/{child}/stat").read_text().split()[2]


def test_a_crash_is_named(tmp_path: Path):
    found = run(tmp_path, "import os, signal; journal.begin('one'); os.kill(os.getpid(), signal.SIGSEGV)")
    assert (found.verdict, found.item) == ("crashed", "one")
    assert "SIGSEGV" in "\n".join(found.lines())


def test_another_failure_shows_the_end_of_the_log(tmp_path: Path):
    found = run(tmp_path, "raise SystemExit('no such thing')")
    assert (found.verdict, found.code) == ("failed", 1)
    assert "no such thing" in check_gpu.report([found], [found.step, steps.FIRST_LIGHT[1]], "")
    assert "not run: gemms" in check_gpu.report([found], [found.step, steps.FIRST_LIGHT[1]], "")


TESTS = """
from tests.support.departure import Departure

def test_right():
    pass

def test_wrong():
    raise Departure("attention of layer 2, row 3", expected="below 0.2", found=0.7, detail="one of 9 rows")

def test_not_reached():
    raise ValueError
"""


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (TESTS, {"tensor": "attention of layer 2, row 3", "expected": "below 0.2", "found": "0.7"}),
        ("import no_such_module\n", {"found": "RuntimeError: ModuleNotFoundError: No module named 'no_such_module'"}),
    ],
)
def test_a_failing_test_is_named(body: str, told: dict[str, str], tmp_path: Path):
    file = tmp_path / "test_some.py"
    file.write_text(body)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    arguments = (*PYTEST, "-q", "-p", "no:cacheprovider", "-c", str(tmp_path / "pytest.ini"), str(file))
    found = run_step(Step("tests", "", arguments, 120), tmp_path / "step")
    assert found.verdict == "departs"
    assert "test_some.py" in found.item and ("test_wrong" in found.item or "no_such" in body)
    for name, start in told.items():
        assert found.account.departure[name].startswith(start)


def test_a_plain_assertion_is_told_in_its_words(tmp_path: Path):
    with pytest.raises(AssertionError), Journal(tmp_path).item("one"):
        raise AssertionError("the largest error is 3\nof 1")
    assert Account.read(tmp_path).departure == {"item": "one", "found": "AssertionError: the largest error is 3\nof 1"}


def test_a_journal_cut_off_in_the_middle_is_read(tmp_path: Path):
    journal = Journal(tmp_path)
    journal.begin("one")
    with (tmp_path / "journal.jsonl").open("a") as file:
        file.write('{"event": "en')
    assert Account.read(tmp_path).open == "one"


def steps_of(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int] | None, *arguments: str, gpus: int = 1
) -> Any:
    """What ``launch/check_gpu`` would run on such GPUs, and what pytest gets; an exit code if nothing."""
    ran: list[Any] = []

    def run(chosen: Any, gpu: str, names: Any, *, again: bool, more: Any) -> int:
        assert len(names) == gpus
        ran.extend((part.name, list(more)) for part in chosen)
        return 0

    def first_light(chosen: Any, what: str, rest: Any, *others: Any, **more: Any) -> int:
        ran.extend((step.name, rest) for step in chosen if what in ("all", step.name))
        return 0

    monkeypatch.setattr(check_gpu, "capability", lambda: capability)
    monkeypatch.setattr(check_gpu, "gpu_name", lambda: "a GPU")
    monkeypatch.setattr(check_gpu, "gpu_names", lambda: [str(number) for number in range(gpus)])
    monkeypatch.setattr(resumable_tests, "run", run)
    monkeypatch.setattr(check_gpu, "first_light", first_light)
    code = check_gpu.main(list(arguments))
    return dict(ran) if code == 0 else code


def test_parts_of_hopper(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PYTEST_ARGUMENTS", "--durations 3")
    found = steps_of(monkeypatch, (9, 0))
    assert {name.partition("-")[0] for name in found} == set(resumable_tests.STEPS) - {"pair"}
    formats = [f"server_formats-{number}of5" for number in range(1, 6)]
    drafted = [f"drafted_server-{number}of3" for number in (1, 2, 3)]
    names = ("server", "server_changes", "sm100_server", *formats, "sampling", "crowd", *drafted)
    servers = [f"server-test_{name}" for name in names]
    assert [name for name in found if name.startswith("server")] == [*servers, "server-soak", "server-load"]
    assert "decoder-test_server" not in found and "decoder-test_w4a16_gemms" in found
    assert found["kernels-test_rope"] == ["--durations", "3"]
    for tool in resumable_tests.SANITIZERS:
        assert len([name for name in found if name.startswith(tool)]) > 10
        assert f"{tool}-test_rope" in found and f"{tool}-test_resources" not in found
        assert [name for name in found if name.startswith(tool) and "gemms" in name] == [
            *(f"{tool}-test_w4a16_gemms-{number}of9" for number in range(1, 10)),
            *(f"{tool}-test_w8a16_gemms-{number}of5" for number in range(1, 6)),
        ]
    monkeypatch.delenv("PYTEST_ARGUMENTS")
    assert steps_of(monkeypatch, (9, 0), "kernels", "-k", "rope")["kernels-test_swiglu"] == ["-k", "rope"]
    assert steps_of(monkeypatch, (9, 0), "racecheck", "tests/triton/test_rope.py") == {"racecheck-test_rope": []}
    assert steps_of(monkeypatch, (9, 0), "racecheck", "tests/gpu/test_server.py") == 2
    assert steps_of(monkeypatch, (9, 0), "instructions") == 2


def test_long_files_run_in_pieces(monkeypatch: pytest.MonkeyPatch):
    """Every test is in one of them."""
    found = list(steps_of(monkeypatch, (9, 0), "memcheck", "tests/triton/test_topk.py"))
    assert found == [f"memcheck-test_topk-{number}of4" for number in (1, 2, 3, 4)]
    files = {file.name for folder in ("triton", "gpu") for file in (ROOT / "tests" / folder).glob("test_*.py")}
    assert {f"test_{name}.py" for name in resumable_tests.PIECES | resumable_tests.SANITIZED_PIECES} < files
    second = resumable_tests.pieces("kernels", "tests/triton/test_topk.py")[1]
    assert second.command(Path("report.xml"))[-3:] == ["--piece", "2/4", "tests/triton/test_topk.py"]


COLLECT = """
import json, sys
import pytest
for arguments in json.loads(sys.argv[1]):
    pytest.main(["--collect-only", "-q", "-p", "no:cacheprovider", "tests/numerics/test_e4m3.py", *arguments])
    print("next", flush=True)
"""


def collected(*calls: Sequence[str]) -> tuple[list[list[str]], str]:
    """The tests that pytest collects with the arguments of each call, and what it says of wrong ones."""
    command = [sys.executable, "-c", COLLECT, json.dumps(calls)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    *outputs, last = done.stdout.split("next\n")
    assert done.returncode == 0 and len(outputs) == len(calls) and not last, done.stdout + done.stderr
    return [[line for line in output.splitlines() if "::" in line] for output in outputs], done.stderr


def test_pieces_hold_every_test_once():
    thirds = [("--piece", f"{number}/3") for number in (1, 2, 3)]
    halves = [("-k", "ue8m0", "--piece", f"{number}/2") for number in (1, 2)]
    (whole, some, *pieces, none), said = collected((), ("-k", "ue8m0"), *thirds, *halves, ("--piece", "3/2"))
    assert len(whole) > len(some) > 1
    assert [name for piece in pieces[:3] for name in piece] == whole
    assert [name for piece in pieces[3:] for name in piece] == some
    assert not none and "--piece" in said


def test_the_pair_needs_two_gpus(monkeypatch: pytest.MonkeyPatch, capsys: Any):
    assert steps_of(monkeypatch, (9, 0), "pair") == 2
    assert "needs two GPUs, this machine shows 1" in capsys.readouterr().err
    pair = [*(f"pair-test_ranks-{number}of2" for number in (1, 2)), "pair-test_pair_crowd"]
    pair += [f"pair-test_drafted_ranks-{number}of2" for number in (1, 2)]
    pair += [
        "pair-test_pro_ranks",
        "pair-test_inbox",
        "pair-test_pushed_ranks",
        "pair-ready-empty",
        "pair-ready-filled",
        "pair-load",
    ]
    assert list(steps_of(monkeypatch, (9, 0), "pair", gpus=2)) == pair
    assert set(pair) < set(steps_of(monkeypatch, (9, 0), gpus=2))
    ready = "launch/benchmarks/ready.py"
    assert list(steps_of(monkeypatch, (9, 0), "pair", ready, gpus=2)) == pair[8:10]


def test_commands_of_programs():
    soak, load = (part for part in resumable_tests.parts(["server"]) if part.is_program)
    assert soak.command(Path("report.xml"), ["-x"], "3")[1:] == ["-m", "programs.soak", "--minutes", "5", "--gpu", "3"]
    assert load.command(Path("report.xml"))[1:] == ["-m", "benchmarks.load", "build/load", "--tp", "1"]


def test_commands_of_parts():
    report = Path("report.xml")
    natively = Part("kernels", "tests/triton/test_rope.py").command(report, ["-k", "x"])
    assert natively[1:] == ["-m", "pytest", "-v", "--junitxml=report.xml", "-k", "x", "tests/triton/test_rope.py"]
    checked = Part("memcheck", "tests/triton/test_rope.py").command(report)
    assert checked[:5] == ["compute-sanitizer", "--tool", "memcheck", "--report-api-errors", "no"]
    assert checked[-5:-1] == ["-m", "not gpu", "-k", resumable_tests.LEFT_OUT]
    gemms = Part("racecheck", resumable_tests.SANITIZED_GEMMS[0]).command(report)
    assert gemms[:3] == ["compute-sanitizer", "--tool", "racecheck"]
    assert gemms[-3:] == ["-m", "sanitized", "tests/gpu/test_w4a16_gemms.py"]
    assert all((ROOT / part.file).exists() for part in resumable_tests.parts())
    assert [part.gpus for part in resumable_tests.parts(["kernels", "server", "pair"])][-20:] == [*9 * [1], *11 * [2]]


def test_every_part_of_a_sanitizer_has_tests():
    """pytest that finds none fails."""
    parts = [part for part in resumable_tests.parts(["memcheck"]) if part.file not in resumable_tests.SANITIZED_GEMMS]
    chosen = ["-m", "not gpu", "-k", resumable_tests.LEFT_OUT, *dict.fromkeys(part.file for part in parts)]
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", *chosen]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    found = Counter(line.partition("::")[0] for line in done.stdout.splitlines() if "::" in line)
    assert found and all(found[part.file] >= part.piece[1] for part in parts), done.stdout + done.stderr


def test_gemms_under_a_sanitizer_are_few_and_of_every_kind():
    """Shapes are chosen by name: those that the sources no longer have must not leave a sanitizer without any."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "--collect-only",
        "-q",
        "-m",
        "sanitized",
        *resumable_tests.SANITIZED_GEMMS,
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    names = [line.partition("::")[2] for line in done.stdout.splitlines() if "::" in line]
    assert done.returncode == 0 and 10 <= len(names) <= 20, done.stdout + done.stderr
    parts = [part for part in resumable_tests.parts(["racecheck"]) if part.file in resumable_tests.SANITIZED_GEMMS]
    assert Counter(part.file for part in parts) == Counter(
        line.partition("::")[0] for line in done.stdout.splitlines() if "::" in line
    ), "a part for each"
    for kind in ("token_tile=8, split_k=8", "token_tile=16", "token_tile=32, split_k=4", "token_tile=64, split_k=2"):
        assert len([name for name in names if name.startswith("test_every_shape") and kind in name]) == 2
    assert any("token_tile=256" in name for name in names)
    experts = [name.partition("[")[2] for name in names if name.startswith("test_experts[")]
    assert [tile.partition("-")[0] for tile in experts] == ["8", "16", "32", "64"]


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(resumable_tests, "RESULTS", tmp_path / "results")
    return tmp_path


def part_of(folder: Path, name: str, body: str) -> Part:
    file = folder / f"test_{name}.py"
    file.write_text(body)
    return Part("kernels", str(file))


def test_tests_that_were_all_skipped_are_not_kept(results: Path):
    """Those of four ranks on two GPUs: they must run where there are four."""
    left_out = part_of(results, "left_out", "import pytest\n@pytest.mark.skip\ndef test_a(): pass\n")
    assert resumable_tests.run([left_out], "a GPU") == 0
    result = resumable_tests.last(left_out)
    assert result is not None and result.verdict == "passed" and result.skipped == 1
    assert resumable_tests.kept(left_out, result.fingerprint) is None


def test_what_passed_is_kept_and_what_did_not_runs_again(results: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch):
    good = part_of(results, "good", "import pytest\ndef test_a(): pass\n@pytest.mark.skip\ndef test_b(): pass\n")
    bad = part_of(results, "bad", "def test_a(): pass\ndef test_wrong(): assert False\n")
    assert resumable_tests.run([good, bad], "a GPU") == 1
    said = capsys.readouterr().out
    assert "1 of 2 parts passed: 2 tests passed, 1 skipped" in said
    assert "NOT PASSED  kernels-test_bad: failed, 1 passed, 0 skipped, 1 failed" in said and "::test_wrong" in said
    Path(bad.file).write_text("def test_a(): pass\n")
    ran: list[Part] = []
    run_part = resumable_tests.run_part

    def note(part: Part, *more: Any) -> Any:
        ran.append(part)
        return run_part(part, *more)

    monkeypatch.setattr(resumable_tests, "run_part", note)
    assert resumable_tests.run([good, bad], "a GPU") == 0 and ran == [bad]
    assert "2 of 2 parts passed: 2 tests passed, 1 skipped" in capsys.readouterr().out
    assert resumable_tests.run([good], "another GPU") == 0 and ran == [bad, good]
    assert resumable_tests.run([good], "another GPU", again=True) == 0 and ran == [bad, good, good]


PROGRAM = """
import os, pathlib, sys, time
here = pathlib.Path(sys.argv[1])
gpu = os.environ.get("CUDA_VISIBLE_DEVICES")
(here / f"{gpu}.runs").touch()
while len(list(here.glob("*.runs"))) < 2 and gpu != sys.argv[2]:
    time.sleep(0.05)
print("the last line", gpu, sys.argv[2])
sys.exit(gpu == sys.argv[3])
"""


def program(folder: Path, step: str, *arguments: str) -> Part:
    (folder / "launch").mkdir(exist_ok=True)
    (folder / "launch" / "some_program.py").write_text(PROGRAM)
    return Part(step, "launch/some_program.py", (str(folder), *arguments), arguments[-1])


def test_programs_get_gpus_of_their_own_and_say_what_they_found(
    results: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
):
    """Each waits for the other; then one that needs both runs, and fails, as it sees all that this process sees."""
    monkeypatch.setattr(resumable_tests, "ROOT", results)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    chosen = [
        program(results, "pair", resumable_tests.GPU, "4,7"),
        *(program(results, "server", resumable_tests.GPU + "x", label) for label in ("a", "b")),
    ]
    assert resumable_tests.run(chosen, "a GPU", ["4", "7"]) == 1
    said = [line for line in capsys.readouterr().out.splitlines() if ", 0 s;" in line or "the last line" in line]
    assert {line.split("the last line ")[1] for line in said[:2]} == {"4 4x", "7 7x"}
    assert said[2].startswith("pair-some_program-4,7: failed") and said[2].endswith("the last line 4,7 0")
    assert resumable_tests.run(chosen[1:], "a GPU", ["4", "7"]) == 0
    assert "2 of which have passed before" in capsys.readouterr().out


WAITS = """
import os, pathlib, time
def test_a():
    assert os.environ["OMP_NUM_THREADS"] == "1"
    assert os.environ["CUDA_VISIBLE_DEVICES"] == {gpu!r}
    here = pathlib.Path({here!r})
    (here / {name!r}).touch()
    deadline = time.monotonic() + 30
    while len(list(here.iterdir())) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.05)
"""


def test_tests_that_need_a_gpu_run_beside_those_that_share_another(results: Path, monkeypatch: pytest.MonkeyPatch):
    """Each waits for the other."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    seen = results / "seen"
    seen.mkdir()
    own, shared = (
        part_of(results, name, WAITS.format(gpu=gpu, here=str(seen), name=name))
        for name, gpu in (("own", "7"), ("shared", "4,7"))
    )
    assert resumable_tests.run([shared, replace(own, step="server")], "two GPUs", ["4", "7"]) == 0


def test_a_tool_that_is_not_there_fails_its_parts_alone(results: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch):
    good = part_of(results, "good", "def test_a(): pass\n")
    monkeypatch.setenv("PATH", str(results))
    assert resumable_tests.run([replace(good, step="memcheck"), good], "a GPU") == 1
    said = capsys.readouterr().out
    assert "1 of 2 parts passed: 1 tests passed" in said
    assert "NOT PASSED  memcheck-test_good: failed, 0 s; compute-sanitizer: No such file" in said and "PATH" in said


def test_parts_that_pytests_arguments_leave_without_tests_pass(results: Path):
    some = part_of(results, "some", "def test_a(): pass\n")
    assert resumable_tests.run([some], "a GPU", more=["-k", "test_b"]) == 0
    assert resumable_tests.run([some], "a GPU", more=["-k", "test_a"]) == 0
    assert resumable_tests.run([part_of(results, "none", "")], "a GPU") == 1


def test_a_report_merges_what_ran_at_different_times(results: Path, capsys: Any):
    good, bad = part_of(results, "good", "def test_a(): pass\n"), part_of(results, "bad", "def test_b(): assert 0\n")
    never = part_of(results, "never", "")
    resumable_tests.run([good], "a GPU")
    resumable_tests.run([bad], "a GPU")
    capsys.readouterr()
    assert resumable_tests.report([good, bad, never]) == 1
    said = capsys.readouterr().out
    assert "1 of 2 parts passed: 1 tests passed" in said and "not run: kernels-test_never" in said
    assert "kernels-test_good: passed, 1 passed" in said and "NOT PASSED  kernels-test_bad" in said
    assert resumable_tests.report([good]) == 0
    assert check_gpu.main(["--report", "kernels", "tests/triton/test_rope.py"]) == 1


def test_other_sources_run_again(results: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(resumable_tests, "ROOT", results)
    (results / "tests").mkdir()
    before = resumable_tests.fingerprint("a GPU")
    assert before == resumable_tests.fingerprint("a GPU") != resumable_tests.fingerprint("another")
    (results / "tests" / "more.py").write_text("1\n")
    with_source = resumable_tests.fingerprint("a GPU")
    (results / "constraints.txt").write_text("torch==1\n")
    with_pins = resumable_tests.fingerprint("a GPU")
    monkeypatch.setattr(resumable_tests, "installed", lambda name: f"another {name}")
    assert len({before, with_source, with_pins, resumable_tests.fingerprint("a GPU")}) == 4


def test_versions_of_what_is_installed():
    assert resumable_tests.installed("torch").split(".")[0].isdigit()
    assert resumable_tests.installed("no-such-distribution") == "absent"


def test_a_part_that_does_not_end_is_ended(results: Path):
    """With what it has started."""
    started = "print(subprocess.Popen(['sleep', '600']).pid)"
    body = f"import subprocess, time\ndef test_a():\n    {started}\n    time.sleep(600)\n"
    result = resumable_tests.run_part(part_of(results, "slow", body), "code", ["-s"], seconds=8)
    assert (result.verdict, result.passed) == ("out of time", 0) and result.seconds < 30
    log = (resumable_tests.RESULTS / "kernels-test_slow.txt").read_text()
    child = next(int(line) for line in log.split() if line.isdigit() and int(line) > 100)
    assert not psutil.pid_exists(child)


@pytest.mark.parametrize("capability", [(10, 0), (10, 3)])
def test_steps_of_blackwell(capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch):
    found = steps_of(monkeypatch, capability)
    assert list(found) == ["instructions", "gemms", "triton", "layer", "model", "server", "timings", "timings_released"]
    assert steps_of(monkeypatch, capability, "layer", "-k", "experts") == {"layer": ["-k", "experts"]}
    assert {name.partition("-")[0] for name in steps_of(monkeypatch, capability, "memcheck")} == {"memcheck"}


def test_gemms_are_checked_in_nvfp4_and_in_mxfp8():
    found = gemms.of_the_models()
    assert len({case.key for case in found}) == len(found)
    of_kind = {kind: [case for case in found if case.kind == kind] for kind in ("nvfp4", "mxfp8")}
    for kind, same in of_kind.items():
        assert len(same) > 30, kind
        assert {case.shape.gated for case in same} == {False, True}, kind
    assert {case.kind for case in gemms.of_a_tiny_model()} == set(of_kind)


def test_every_gemm_is_timed_in_nvfp4_and_as_released(monkeypatch: pytest.MonkeyPatch, capsys: Any):
    """The commands' options are the benchmark's; nothing is compiled or emulated beside what is timed."""
    monkeypatch.setattr(bench, "b200", lambda: None)
    timed = [step for step in steps.FIRST_LIGHT if step.name.startswith("timings")]
    said = []
    for step in timed:
        assert step.command[:2] == ("-m", "benchmarks.sm100.bench")
        assert bench.main([*step.command[2:], "--models", "flash", "--tp", "8", "--tokens", "1"]) == 0
        said.append(capsys.readouterr())
    assert ["mxfp8" in one.out for one in said] == [False, True]
    assert not any(one.err for one in said)


def test_a_gpu_of_another_kind_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: Any):
    assert steps_of(monkeypatch, (8, 0)) == 2
    assert "expected a GPU of capability 9.0, 10.0 or 10.3, found 8.0" in capsys.readouterr().err


def test_without_a_gpu_it_says_what_does_not_need_one(monkeypatch: pytest.MonkeyPatch, capsys: Any):
    assert steps_of(monkeypatch, None) == 2
    assert "--emulated" in capsys.readouterr().err


def test_the_page_for_those_who_have_one_names_each_step_and_its_limit():
    text = (ROOT / "docs" / "first_light.md").read_text()
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    limits = {row[0]: row[-1] for row in rows if row[-1].endswith(" min")}
    assert limits == {step.name: f"{step.seconds / 60:.0f} min" for step in steps.FIRST_LIGHT}
    assert "docs/first_light.md" in (ROOT / "README.md").read_text()


def test_every_step_runs_files_that_exist():
    for step in steps.FIRST_LIGHT:
        assert 0 < step.seconds <= 5400
        for argument in step.command:
            if "/" in argument:
                assert (ROOT / argument).exists(), argument
