"""Kinds of values that only requests have."""

from __future__ import annotations

import re
from typing import Any

from nvfp4_sgl.serving.fields.checks import Check, found, plain
from nvfp4_sgl.serving.fields.limits import LARGEST, MAX_LOGIT_BIASES

HEALTH_CHECK = "HEALTH_CHECK"
"""Beginning of the names of SGLang's own health checks, which it does not answer while others run."""

MAX_NAME_CHARACTERS = 256

TOKEN_ID = re.compile("0|[1-9][0-9]*")
"""As decimal strings are written: another spelling would name a token twice, of whose biases one would be lost."""


def request_name() -> Check:
    """The name of a request."""
    return plain(
        f"a string of 1 to {MAX_NAME_CHARACTERS} characters that does not begin with {HEALTH_CHECK}",
        lambda value: (
            isinstance(value, str) and 0 < len(value) <= MAX_NAME_CHARACTERS and not value.startswith(HEALTH_CHECK)
        ),
        inside=("a request's name", "x" * MAX_NAME_CHARACTERS),
        outside=("", "x" * (MAX_NAME_CHARACTERS + 1), f"{HEALTH_CHECK}_1", 5, True, {}),
    )


def logit_bias() -> Check:
    """An object of token ids, as decimal strings, and finite biases."""
    expected = f"an object of at most {MAX_LOGIT_BIASES} token ids and their biases, {-LARGEST:g} to {LARGEST:g}"

    def fault(where: str, value: Any) -> str | None:
        if not isinstance(value, dict):
            return found(where, value, expected)
        if len(value) > MAX_LOGIT_BIASES:
            return f"{where}: found {len(value)} tokens; expected {MAX_LOGIT_BIASES} or fewer"
        for token, bias in value.items():
            if not (isinstance(token, str) and len(token) <= 4096 and TOKEN_ID.fullmatch(token)):
                return f"{where}: found the token {token!r:.80}; expected token ids, such as '1', and not '01'"
            if type(bias) not in (int, float) or not abs(bias) <= LARGEST:
                return found(f"{where}[{token[:20]}]", bias, f"a number from {-LARGEST:g} to {LARGEST:g}")
        return None

    inside: tuple[Any, ...] = ({}, {"30": 1, "31": -LARGEST, "0": LARGEST})
    beyond: list[Any] = [{"30": bias} for bias in (1e31, -1e31, "1", None, True)]
    beyond += [{token: 1} for token in ("-1", "a", "1.5", "01")]
    return Check(expected, fault, inside, (*beyond, {f"{n}": 1 for n in range(MAX_LOGIT_BIASES + 1)}, [], 5, "30"))
