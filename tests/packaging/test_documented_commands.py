"""Every command in README.md and docs exists and takes the options that it is given; every path named there exists."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import yaml

from nvfp4_sgl.cli import COMMANDS, build_parser
from tests.packaging.checkout import ROOT
from tests.support.documents import Command, commands, links, pages, references, sections, unread

PLACEHOLDERS = {
    "FORMAT": "nvfp4-full",
    "NAMES": "original",
    "N": "2",
    "CLASS,…": "experts",
    "STEP": "kernels",
    "toy": "cpu",
}
"""What stands for a value in running text, or is there once a page's steps are taken, and a value; others (DIR, OUT, …)
are taken as they are."""
OUTSIDE = (
    *("cp", "curl", "docker", "hf", "install", "journalctl", "pip", "pre-commit", "ruff", "sed", "source", "systemctl"),
    *("tar", "useradd"),
)
"""First words of commands that are not this project's."""
MADE_BY_THE_READER = "my_kernel"
"""Part of the names of files that a page tells its reader to make."""
PYTEST = ("--full", "-k", "-m")
TREES = ("cutedsl_kernels", "docs", "examples", "launch", "nvfp4_sgl", "tests", "triton_kernels")
PATH = re.compile(rf"`((?:{'|'.join(TREES)})/[\w./*-]+)`")


class Wrong(Exception):
    """A command of a page that would not run; the message says why."""


def found() -> list[Command]:
    return [
        command
        for page in pages()
        for command in commands(str(page.relative_to(ROOT)), page.read_text(encoding="utf-8"))
    ]


def check(command: Command) -> None:
    """:class:`Wrong` if ``command`` would be refused, as far as that shows without running it."""
    words = [PLACEHOLDERS.get(word, word) for word in command.words]
    if words[0].startswith("launch/"):
        check_launch(words)
    elif words[0] == "nvfp4-sgl":
        check_nvfp4_sgl(words[1:], command.whole)
    elif words[:3] == ["python", "-m", "sglang.launch_server"]:
        check_server(tuple(words[3:]), command.whole)
    elif words[:2] == ["sglang", "serve"]:
        check_server(("--model-path", *words[2:]), command.whole)
    elif words[:3] == ["python", "-m", "nvfp4_sgl.cli"]:
        check_nvfp4_sgl(words[3:], command.whole)
    elif words[0] == "python" and words[1] == "-m":
        check_module(words)
    elif words[0] == "python":
        require_path(words[1])
    elif words[0] not in OUTSIDE:
        raise Wrong(f"{words[0]}: no command of this project, and not among those known to this test")
    for word in words if words[0] in OUTSIDE else ():
        if word.startswith(tuple(f"{tree}/" for tree in TREES)):
            require_path(word)


def require_path(path: str) -> None:
    if MADE_BY_THE_READER not in path and not list(ROOT.glob(path.rstrip("/"))):
        raise Wrong(f"{path}: there is no such file")


def options(words: list[str]) -> list[str]:
    return [word.partition("=")[0] for word in words if re.match(r"--?[A-Za-z]", word)]


def check_launch(words: list[str]) -> None:
    script, *rest = words
    require_path(script)
    if not rest or "*" in script:
        return
    if script == "launch/test":
        for option in options(rest):
            if option not in PYTEST:
                raise Wrong(f"{option}: expected one of {PYTEST}")
        for word in rest:
            if word.startswith("tests/"):
                require_path(word)
        return
    if not os.access(ROOT / script, os.X_OK):
        raise Wrong(f"{script}: is not executable")
    known = re.findall(r"(?<![\w-])--?[A-Za-z][\w-]*", help_of(script))
    for option in options(rest):
        if option not in known:
            raise Wrong(f"{script} {option}: {script} --help does not list it")


@cache
def help_of(script: str) -> str:
    """What ``--help`` prints, and how to call it in the script's own words."""
    file = ROOT / script
    if script == "launch/docs":
        return file.read_text()
    environment = os.environ | {"PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([file, "--help"], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{script} --help: {done.stdout}{done.stderr}"
    return done.stdout


def check_nvfp4_sgl(words: list[str], whole: bool) -> None:
    if words[0] not in COMMANDS and words[0].startswith("-"):
        whole = True
    elif words[0] not in COMMANDS:
        raise Wrong(f"nvfp4-sgl {words[0]}: no such command")
    parser = build_parser(chosen=words[0])
    if whole:
        parse(parser, words)
        return
    (chosen,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    known = chosen.choices[words[0]]._option_string_actions
    for option in options(words):
        if option not in known:
            raise Wrong(f"nvfp4-sgl {words[0]} {option}: no such option")


def parse(parser: argparse.ArgumentParser, words: list[str]) -> None:
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(io.StringIO()):
            parser.parse_args(words)
    except SystemExit as end:
        if end.code:
            raise Wrong(errors.getvalue().strip()[-300:]) from None


@cache
def server_parser() -> argparse.ArgumentParser:
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser(allow_abbrev=False)
    ServerArgs.add_cli_args(parser)
    return parser


def check_server(words: tuple[str, ...], whole: bool) -> None:
    if whole:
        parse(server_parser(), list(words))
    for option in options(list(words)):
        if option not in server_parser()._option_string_actions:
            raise Wrong(f"sglang.launch_server {option}: no such option")


def check_module(words: list[str]) -> None:
    name = words[2]
    if name in ("mypy", "pytest"):
        for word in words[3:]:
            if word.startswith("tests/"):
                require_path(word)
        return
    require_path(f"launch/{name.replace('.', '/')}.py")


@pytest.mark.parametrize("command", found(), ids=str)
def test_a_documented_command_would_run(command: Command) -> None:
    check(command)


def test_the_compose_file_s_command_would_run() -> None:
    (service,) = yaml.safe_load((ROOT / "launch/container/compose.yaml").read_text())["services"].values()
    parse(server_parser(), [re.sub(r"\$\{\w+:-(\w+)\}", r"\1", word) for word in service["command"]])


def test_commands_are_found() -> None:
    """All kinds, in fences and in running text."""
    lines = {" ".join(command.words) for command in found()}
    assert len(lines) > 80
    for expected in ("launch/demo", "nvfp4-sgl doctor DIR --tp 2", "launch/demo --keep", "launch/lock"):
        assert expected in lines
    assert any(line.startswith("python -m sglang.launch_server") and "dummy" in line for line in lines)


@pytest.mark.parametrize(
    "text",
    [
        "```bash\nlaunch/dem\n```",
        "```bash\nlaunch/demo --tragte sm_100a\n```",
        "```bash\nlaunch/test tests/nothing\n```",
        "```bash\nlaunch/test --everything\n```",
        "```bash\nlaunch/bench_full ours --tpp 2\n```",
        "```bash\nnvfp4-sgl inspct DIR\n```",
        "```bash\nnvfp4-sgl inspect DIR --no-values\n```",
        "```bash\nnvfp4-sgl inspect\n```",
        "```bash\nnvfp4-sgl build DIR --target sm_80\n```",
        "```\nNVFP4_SGL_KERNELS=OUT nvfp4-sgl convert SRC\n```",
        "```bash\npython -m sglang.launch_server --model-pth DIR\n```",
        "```bash\npython -m sglang.launch_server --model-path DIR \\\n    --tensor-paralel-size 2\n```",
        "```bash\npython examples/one_opp.py\n```",
        "```bash\nsglang serve DIR --tensor-paralel-size 2\n```",
        '```bash\n"$env/bin/nvfp4-sgl" docter\n```',
        "```bash\npython -m nvfp4_sgl.cli docter\n```",
        "```bash\npython -m nvfp4_sgl.cli inspect DIR --no-values\n```",
        "```bash\npython -m nvfp4_sgl.checkpoint.inventory DIR\n```",
        "```text\nlaunch/demo --keeep\n```",
        "```bash\nunheard-of --help\n```",
        "say `nvfp4-sgl verify DIR --agianst SRC` then",
        "say `launch/demo --keeep` then",
        "say `python -m sglang.launch_server --model-path X --load-formt dummy`",
        "say `python -m benchmarks.chart`",
    ],
)
def test_a_wrong_command_is_seen(text: str) -> None:
    (command,) = commands("page", text)
    with pytest.raises(Wrong):
        check(command)


def test_the_command_line_by_its_module_is_fine() -> None:
    (command,) = commands("page", "```bash\npython -m nvfp4_sgl.cli inspect DIR --values\n```")
    check(command)


def test_paths_in_pages_exist() -> None:
    missing = [
        f"{page.relative_to(ROOT)}: {path}"
        for page in pages()
        for path in PATH.findall(page.read_text(encoding="utf-8"))
        if not list(ROOT.glob(path.rstrip("/.")))
    ]
    assert not missing, "\n".join(missing)


def broken(page: Path, text: str) -> list[str]:
    """Links of a page that lead nowhere, and those by reference, each with its line."""
    found = [f"{page.name}:{line}: {link}: expected a link with its target" for line, link in references(text)]
    for link in links(text):
        file = page.parent / link.path if link.path else page
        if not file.exists():
            found.append(f"{page.name}:{link.line}: {link.path}: there is no such file")
        elif link.section:
            there = text if file == page else file.read_text(encoding="utf-8")
            if link.section not in sections(there):
                found.append(f"{page.name}:{link.line}: {link.path}#{link.section}: there is no such section")
    return found


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    """In the repository, too, where mkdocs does not check them."""
    found = broken(page, page.read_text(encoding="utf-8"))
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[a](docs/gone.md)", "docs/gone.md: there is no such file"),
        ("[a](docs/index.md#gone)", "docs/index.md#gone: there is no such section"),
        ("[a](#gone)", "#gone: there is no such section"),
        ('[a](docs/gone.md "title")', "docs/gone.md: there is no such file"),
        ("<a href='docs/gone.md'>a</a>", "docs/gone.md: there is no such file"),
        ("<img src=docs/gone.svg>", "docs/gone.svg: there is no such file"),
        ("[a][gone]", "][gone]: expected a link with its target"),
        ("[a]: docs/index.md", "[a]:: expected a link with its target"),
    ],
)
def test_a_broken_link_is_seen(text: str, message: str) -> None:
    assert broken(ROOT / "README.md", f"# Page\n{text}\n") == [f"README.md:2: {message}"]


def test_a_link_that_leads_somewhere_passes() -> None:
    text = "# A page\n\n[a](#a-page) [b](docs/index.md#where-to-go) [c](https://example.org/x#y) `x[0][1]`\n"
    assert not broken(ROOT / "README.md", text)


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_all_code_of_a_page_is_read(page: Path) -> None:
    found = [f"{page.name}:{line}: {what}" for line, what in unread(page.read_text(encoding="utf-8"))]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "text",
    [
        "```console\n$ launch/dem\n```",
        "```sh\nlaunch/dem\n```",
        "```bash title=x\nlaunch/dem\n```",
        "~~~bash\nlaunch/dem\n~~~",
        "* Item\n\n  ```bash\n  launch/dem\n  ```",
        "Text:\n\n    launch/dem",
        "Text:\n\n\tlaunch/dem",
    ],
)
def test_code_that_nothing_reads_is_refused(text: str) -> None:
    assert list(unread(text))


def test_code_that_is_read_passes() -> None:
    text = "```bash\nlaunch/demo\n```\n\n* Item\n    * nested\n    goes on\n\n```python\nif x:\n\n    y()\n```\n"
    assert not list(unread(text))


def known_options() -> set[str]:
    """Options of every command of this project, of the server and of the tools that pages name."""
    known = {"--help", "--version", "-h", *server_parser()._option_string_actions, *PYTEST}
    for name in COMMANDS:
        (chosen,) = (a for a in build_parser(name)._actions if isinstance(a, argparse._SubParsersAction))
        known |= set(chosen.choices[name]._option_string_actions)
    for file in (ROOT / "launch").rglob("*"):
        if file.is_file() and file.suffix in ("", ".py"):
            known |= set(re.findall(r"(?<![\w-])--[a-z][\w-]*", file.read_text(encoding="utf-8")))
    return known


def test_options_named_in_running_text_exist() -> None:
    """An option by itself, such as ``--values`` in a sentence: of some command, if not of which."""
    known = known_options()
    unknown = [
        f"{page.relative_to(ROOT)}: {option}"
        for page in pages()
        if page.name not in ("specification.md", "own_kernel.md", "coming_from.md")  # the last names vLLM's options
        for option in re.findall(r"`(--[a-z][\w-]*)[ `=]", page.read_text(encoding="utf-8"))
        if option not in known
    ]
    assert not unknown, "\n".join(unknown)


def test_the_readme_fits_two_screens_and_leads_to_every_page() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(readme.splitlines()) <= 90
    linked = "".join(page.read_text(encoding="utf-8") for page in ROOT.glob("*.md"))
    for page in Path(ROOT / "docs").glob("*.md"):
        assert f"(docs/{page.name}" in linked or page.name == "security.md", f"README.md does not lead to {page.name}"
