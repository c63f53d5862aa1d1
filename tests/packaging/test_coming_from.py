"""docs/coming_from.md: each flag and field has the verdict that the tables of flags and fields give it."""

from __future__ import annotations

import argparse
import json
import re
from functools import cache
from typing import Any

import pytest

from nvfp4_sgl.errors import Nvfp4SglError
from nvfp4_sgl.serving import arguments, flags
from nvfp4_sgl.serving.fields.bodies import body_fault
from nvfp4_sgl.serving.flags.row import Refused, WithoutEffect, Works
from nvfp4_sgl.serving.sglang import settings
from tests.packaging.checkout import ROOT
from tests.support.documents import table

PAGE = (ROOT / "docs" / "coming_from.md").read_text(encoding="utf-8")
VERDICTS = {Works: "works", Refused: "refused", WithoutEffect: "no effect"}


@cache
def options() -> dict[str, argparse.Action]:
    """SGLang's options by their spelling."""
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser(allow_abbrev=False)
    ServerArgs.add_cli_args(parser)
    return {spelling: action for action in parser._actions for spelling in action.option_strings}


def verdict(words: str) -> str:
    """What becomes of a flag, alone or with a value that the page gives it."""
    spelling, _, value = words.partition(" ")
    action = options()[spelling]
    if not value:
        return VERDICTS[type(flags.ROWS[action.dest])]
    typed = action.type(value) if callable(action.type) else value
    assert action.choices is None or typed in action.choices, f"{words}: SGLang has no such value"
    unset = settings.unset_arguments()
    given: dict[str, Any] = unset | {action.dest: typed}
    try:
        arguments.check_arguments(given)
    except Nvfp4SglError:
        return "refused"
    return "no effect" if list(flags.without_effect(given, unset)) else "works"


def cases(name: str) -> list[tuple[str, str]]:
    """(flag or field, verdict) of a table of the page."""
    return [(code, said) for codes, said, _ in table(PAGE, name) for code in re.findall("`(.*?)`", codes)]


@pytest.mark.parametrize(("words", "said"), cases("sglang"))
def test_a_flag_of_sglang(words: str, said: str) -> None:
    assert verdict(words) == said


@pytest.mark.parametrize("words", [code for row in table(PAGE, "vllm") for code in re.findall("`(.*?)`", row[1])])
def test_what_replaces_a_flag_of_vllm_works(words: str) -> None:
    assert verdict(words) == "works"


@pytest.mark.parametrize(("field", "said"), cases("fields"))
def test_a_field(field: str, said: str) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], **json.loads(field)}
    fault = body_fault("/v1/chat/completions", json.dumps(body).encode())
    assert (fault is None) == (said == "works"), fault


def test_flags_named_as_instead_work() -> None:
    """The third column of the first table names flags that a server has."""
    named = [code for row in table(PAGE, "sglang") for code in re.findall("`(--[^ `]+)", row[2])]
    assert named and all(name in options() for name in named)


def test_the_tables_are_found() -> None:
    assert len(cases("sglang")) > 60 and len(table(PAGE, "vllm")) >= 20 and len(cases("fields")) >= 15
    assert {said for _, said in cases("sglang")} == set(VERDICTS.values())


@pytest.mark.parametrize(
    ("words", "wrong"),
    [("--tp-size", "refused"), ("--pp-size", "works"), ("--revision", "works"), ("--page-size 64", "works")],
)
def test_a_wrong_verdict_is_seen(words: str, wrong: str) -> None:
    assert verdict(words) != wrong
