"""What is shipped beside the package: container and compose files, hooks, editor settings, changelog, metadata."""

from __future__ import annotations

import configparser
import itertools
import re
import shlex
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from nvfp4_sgl import __version__
from tests.packaging.checkout import ROOT
from tests.support.documents import Command, commands, fences, pages

CONTAINER = ROOT / "launch" / "container"
SYSTEMD = ROOT / "launch" / "systemd"
INSTRUCTIONS = {"ARG", "FROM", "WORKDIR", "COPY", "RUN", "ENV", "USER", "EXPOSE", "ENTRYPOINT", "CMD"}


class Fault(Exception):
    """What a linter would say of a Dockerfile."""


def instructions(text: str) -> list[tuple[str, str]]:
    """(instruction, arguments) of each logical line; :class:`Fault` for one that Docker does not know."""
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    found = []
    for logical in "\n".join(lines).replace("\\\n", " ").splitlines():
        name, _, arguments = logical.strip().partition(" ")
        if name not in INSTRUCTIONS:
            raise Fault(f"{name}: expected one of {sorted(INSTRUCTIONS)}")
        if not arguments.strip():
            raise Fault(f"{name}: expected arguments")
        found.append((name, " ".join(arguments.split())))
    return found


def lint(text: str, ignored: list[str]) -> None:
    """:class:`Fault` if an image could not be built or would not be pinned, as far as the text shows."""
    parsed = instructions(text)
    names = [name for name, _ in parsed]
    if names.count("FROM") != 1 or set(names[: names.index("FROM")]) - {"ARG"}:
        raise Fault("FROM: expected one, after nothing but ARG")
    arguments = dict(argument.split("=", 1) for name, argument in parsed if name == "ARG")
    image = re.sub(r"\$\{(\w+)\}", lambda match: arguments[match[1]], dict(parsed)["FROM"])
    if not re.search(r"[:@][\w.-]+$", image) or image.endswith(":latest"):
        raise Fault(f"FROM {image}: expected a tag")
    copied = set()
    for name, argument in parsed:
        if name == "COPY":
            *given, target = argument.split()
            for path in given:
                if not (ROOT / path).exists():
                    raise Fault(f"COPY {path}: there is no such file")
                if f"!{path}" not in ignored:
                    raise Fault(f"COPY {path}: Dockerfile.dockerignore leaves it out")
                copied.add(path)
            if len(given) > 1 and not target.endswith("/"):
                raise Fault(f"COPY {argument}: several files need a folder")
        if name == "RUN" and subprocess.run(["bash", "-n", "-c", argument], capture_output=True).returncode:
            raise Fault(f"RUN {argument}: not a shell command")
        if name == "RUN" and "pip install" in argument and "--constraint constraints.txt" not in argument:
            raise Fault("RUN pip install: expected --constraint constraints.txt")
    users = [argument.partition(":")[0] for name, argument in parsed if name == "USER"]
    if not users or users[-1] in ("0", "root"):
        raise Fault(f"USER {users}: expected one other than root")
    missing = {"pyproject.toml", "constraints.txt", "nvfp4_sgl", "triton_kernels", "cutedsl_kernels"} - copied
    if missing:
        raise Fault(f"COPY: expected {sorted(missing)} too")


@pytest.fixture(scope="module")
def dockerfile() -> str:
    return (CONTAINER / "Dockerfile").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def ignored() -> list[str]:
    return (CONTAINER / "Dockerfile.dockerignore").read_text().splitlines()


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    with (ROOT / "pyproject.toml").open("rb") as file:
        return tomllib.load(file)["project"]


def test_the_dockerfile_passes(dockerfile: str, ignored: list[str], project: dict[str, Any]) -> None:
    lint(dockerfile, ignored)
    (sglang,) = (text for text in project["dependencies"] if text.startswith("sglang=="))
    assert f":v{sglang.partition('==')[2]}\n" in dockerfile, "expected the pinned SGLang's plain tag"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("COPY nvfp4_sgl ", "COPY nvfp4_sg "),
        ("COPY triton_kernels ./triton_kernels\n", ""),
        ("FROM ${SGLANG_IMAGE}", "FRM ${SGLANG_IMAGE}"),
        (":v0.5.23", ":latest"),
        ("USER 10001:0", "USER root"),
        ("USER 10001:0\n", ""),
        ("--constraint constraints.txt", ""),
        ("LICENSE ./", "LICENSE ."),
        ("&& python3", "&& && python3"),
        ("COPY launch/src ", "COPY launch/test "),
    ],
)
def test_a_fault_in_the_dockerfile_is_seen(old: str, new: str, dockerfile: str, ignored: list[str]) -> None:
    assert old in dockerfile
    with pytest.raises(Fault):
        lint(dockerfile.replace(old, new), ignored)


@pytest.fixture(scope="module")
def service() -> dict[str, Any]:
    (service,) = yaml.safe_load((CONTAINER / "compose.yaml").read_text())["services"].values()
    return service


def test_the_compose_file(service: dict[str, Any], dockerfile: str) -> None:
    build = service["build"]
    context = (CONTAINER / build["context"]).resolve()
    assert context == ROOT and (context / build["dockerfile"]).is_file()
    assert service["ports"] == ["127.0.0.1:30000:30000"], "published on this machine alone"
    assert service["deploy"]["resources"]["reservations"]["devices"][0]["capabilities"] == ["gpu"]
    checkpoint, kernels = service["volumes"]
    assert checkpoint["read_only"] and checkpoint["type"] == "bind" and not checkpoint["bind"]["create_host_path"]
    home = dict(re.findall(r"^ENV (\w+)=(.*)$", dockerfile, re.MULTILINE))["HOME"]
    assert kernels == {"type": "volume", "source": "kernels", "target": f"{home}/.cache"}


def test_the_container_outlives_faults_and_lets_requests_finish(service: dict[str, Any]) -> None:
    assert service["restart"] == "unless-stopped"
    assert service["stop_grace_period"] == "10m", "Docker kills after 10 s otherwise"
    assert any(word.startswith("--api-key=") for word in service["command"])
    assert not service["user"].startswith(("0", "root"))


def interpolated(text: str, environment: dict[str, str]) -> str:
    """``text`` as Compose reads it: ``${X:-default}``, ``${X:+if set}``, ``${X:?what to do}`` (then KeyError)."""

    def value(match: re.Match[str]) -> str:
        name, operator, word = match.groups()
        given = environment.get(name, "")
        if operator == "+":
            return word if given else ""
        if not given and operator == "?":
            raise KeyError(word)
        return given or word

    return re.sub(r"\$\{(\w+):([-+?])([^}]*)\}", value, text)


@pytest.mark.parametrize(
    ("environment", "path"), [({}, "/checkpoint"), ({"REVISION": "0a1b2c"}, "/checkpoint/snapshots/0a1b2c")]
)
def test_compose_serves_a_folder_or_a_snapshot(environment: dict[str, str], path: str, service: dict[str, Any]) -> None:
    """Files of a snapshot are links to ``../../blobs``: the repository's folder is mounted, not the snapshot's."""
    command = [interpolated(word, environment | {"API_KEY": "key"}) for word in service["command"]]
    assert command[command.index("--model-path") + 1] == path


def test_compose_asks_for_the_checkpoint_and_the_key(service: dict[str, Any]) -> None:
    with pytest.raises(KeyError, match="set API_KEY"):
        [interpolated(word, {}) for word in service["command"]]
    with pytest.raises(KeyError, match="set CHECKPOINT to the absolute path"):
        interpolated(service["volumes"][0]["source"], {})


# --- the service --------------------------------------------------------------------------------------------------


def unit() -> configparser.ConfigParser:
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string((SYSTEMD / "nvfp4-sgl.service").read_text())
    return parser


def test_the_service_ends_cleanly_and_starts_again() -> None:
    service = unit()["Service"]
    assert service["KillMode"] == "mixed", "a SIGTERM to every rank cuts answers off"
    assert int(service["TimeoutStopSec"]) == 600 and service["Restart"] == "on-failure"
    assert service["User"] not in ("", "root")
    words = shlex.split(service["ExecStart"])
    assert words[1:3] == ["-m", "sglang.launch_server"] and words[3:] == ["--config", "/etc/nvfp4-sgl/server.yaml"]


def test_the_service_s_flags_are_the_server_s() -> None:
    from sglang.srt.utils.server_args_config_parser import ConfigArgumentMerger

    from tests.packaging.test_documented_commands import server_parser

    file = SYSTEMD / "server.yaml"
    words = ConfigArgumentMerger(server_parser()).merge_config_with_args(["--config", str(file)])
    given = server_parser().parse_args(words)
    assert given.host == "127.0.0.1" and given.enable_metrics and given.api_key
    page = (ROOT / "docs" / "deployment.md").read_text(encoding="utf-8")
    shown = next(body for _, language, body in fences(page) if language == "yaml" and "model-path" in body)
    assert yaml.safe_load(shown) == yaml.safe_load(file.read_text())


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    """With a program that is there in place of the server's."""
    file = tmp_path / "nvfp4-sgl.service"
    file.write_text((SYSTEMD / file.name).read_text().replace("/srv/nvfp4-sgl/venv/bin/python", "/bin/true"))
    done = subprocess.run(["systemd-analyze", "verify", str(file)], capture_output=True, text=True)
    ours = [line for line in (done.stdout + done.stderr).splitlines() if str(file) in line or file.name in line]
    assert not ours, ours


def test_hooks_run_the_pinned_tools() -> None:
    (repository,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert repository["repo"] == "local"
    for hook in repository["hooks"]:
        command = shlex.split(hook["entry"])
        assert command[:2] == ["bash", "-c"]
        assert ("launch/environment" in command[2]) == (hook.get("stages") is None), (
            "the message's needs no environment"
        )
        assert subprocess.run(["bash", "-n", "-c", command[2]]).returncode == 0
    assert [hook["id"] for hook in repository["hooks"]] == ["ruff-check", "ruff-format", "mypy", "commit-message"]


def test_the_type_checker_s_hook_sees_the_changed_files_alone(tmp_path: Path) -> None:
    """What the hook runs is given the files that changed, and they are files of the checkout."""
    (repository,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    (hook,) = (hook for hook in repository["hooks"] if hook["id"] == "mypy")
    assert hook.get("pass_filenames", True)
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    (tmp_path / "launch").mkdir()
    (tmp_path / "launch" / "environment").write_text(f"#!/bin/sh\necho {tmp_path}\n")
    for file in (python, tmp_path / "launch" / "environment"):
        file.chmod(0o755)
    changed = ["nvfp4_sgl/files.py", "tests/conftest.py"]
    command = [*shlex.split(hook["entry"]), *changed]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    words = done.stdout.split()
    assert words[:2] == ["-m", "mypy"] and words[-2:] == changed
    assert all(re.search(hook["files"], file) for file in changed) and not re.search(hook["files"], "docs/hook.py")


def written(command: Command) -> list[str]:
    """Paths inside the checkout that a documented command writes, as its page names them."""
    words = list(command.words)
    found = [value for option, value in itertools.pairwise(words) if option in ("--html", "--output")]
    if words[:2] == ["nvfp4-sgl", "tiny"]:
        found.append(words[2])
    if words[:2] == ["nvfp4-sgl", "convert"]:
        found += words[3:4]
    return [path for path in found if re.search("[a-z]", path) and not path.startswith(("/", "-"))]


def test_git_ignores_what_documented_commands_write() -> None:
    """Paths in capitals are the reader's own, and scripts without such an option write under ``build``."""
    paths = {
        path
        for page in pages()
        for command in commands(page.name, page.read_text(encoding="utf-8"))
        for path in (written(command) if command.whole else [])
    } | {"build/check_gpu", "dist/nvfp4_sgl-0.1.0.tar.gz", "nvfp4_sgl-0.1.0-py3-none-any.whl"}
    assert {"tiny-checkpoint", "Flash-NVFP4", "report.html"} <= paths
    listed = [f"{path}/config.json" if "." not in path else path for path in sorted(paths)]
    ignored = subprocess.run(["git", "check-ignore", *listed], cwd=ROOT, capture_output=True, text=True).stdout.split()
    assert ignored == listed


def test_editors_are_told_ruff_s_width() -> None:
    parser = configparser.ConfigParser()
    parser.read_string("[top]\n" + (ROOT / ".editorconfig").read_text())
    with (ROOT / "pyproject.toml").open("rb") as file:
        width = tomllib.load(file)["tool"]["ruff"]["line-length"]
    assert parser["*"]["max_line_length"] == str(width) and parser["top"]["root"] == "true"


def test_metadata(project: dict[str, Any]) -> None:
    assert project["requires-python"] == ">=3.11,<3.13", "where constraints.txt holds and SGLang has wheels"
    versions = {text.rpartition(" ")[2] for text in project["classifiers"] if re.search(r":: 3\.\d+$", text)}
    assert versions == {"3.11", "3.12"}
    assert project["authors"] and project["urls"] and project["license"] == "Apache-2.0"


def test_the_compatibility_page_names_the_pins(project: dict[str, Any]) -> None:
    page = (ROOT / "docs" / "compatibility.md").read_text(encoding="utf-8")
    rows = page.partition("<!-- pins -->")[2].partition("<!-- end -->")[0]
    pins = dict(text.split("==") for text in project["dependencies"] if "==" in text)
    assert len(pins) == 5
    for name, version in pins.items():
        title = "CuTeDSL (`nvidia-cutlass-dsl`)" if name == "nvidia-cutlass-dsl" else name
        assert re.search(rf"^\| {re.escape(title)} \| {re.escape(version)}\b", rows, re.MULTILINE | re.IGNORECASE), name


def test_the_changelog_knows_this_version() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    headings = re.findall(r"^## \[(.+?)\]", text, re.MULTILINE)
    assert headings[0] == "Unreleased" and __version__ in text
