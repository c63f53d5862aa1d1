"""Who waits for which compilation, and what becomes of it: no server, nothing of SGLang's."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import xgrammar

from nvfp4_sgl.serving.grammar_compilations import AT_ONCE, Compilation, Compilations, Stopped
from nvfp4_sgl.serving.grammar_compiler import ALL_LEFT, Compiler, CompilerProcess, follow

SECONDS = 20


class Grammar:
    """Counts its copies."""

    copies = 0

    def copy(self) -> Grammar:
        Grammar.copies += 1
        return Grammar()


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_equal_grammars_are_compiled_once() -> None:
    """Each request has a grammar of its own, as each has a state of its own."""
    compilations, calls, go = Compilations(), [], threading.Event()

    def compile(*key: Any) -> Grammar:
        calls.append(key)
        assert go.wait(SECONDS)
        return Grammar()

    futures = [compilations.submit(compile, ("regex", "a"), False) for _ in range(5)]
    other = compilations.submit(compile, ("regex", "a"), True)
    go.set()
    found = {id(future.result(SECONDS)) for future in futures}
    late = compilations.submit(compile, ("regex", "a"), False)
    found |= {id(late.result(SECONDS)), id(other.result(SECONDS))}
    assert len(found) == 7 and sorted(calls) == [(("regex", "a"), False), (("regex", "a"), True)]
    compilations.keep([])
    assert compilations.submit(compile, ("regex", "a"), False).result(SECONDS) and len(calls) == 3


def test_a_compilation_ends_with_its_last_request() -> None:
    compilations, (ours, theirs) = Compilations(), socket.socketpair()

    def compile(*key: Any) -> Grammar:
        compilation = compilations.current()
        compilation.watch(ours)
        ours.recv(1)
        raise RuntimeError("hung up")

    first, second = (compilations.submit(compile, "key") for _ in range(2))
    first.cancel()
    theirs.settimeout(0.2)
    with pytest.raises(TimeoutError):
        theirs.recv(1)
    second.cancel()
    theirs.settimeout(SECONDS)
    assert theirs.recv(1) == b"", "hung up"
    again = compilations.submit(lambda key: Grammar(), "key")
    assert isinstance(again.result(SECONDS), Grammar), "who comes later does not join one that was stopped"
    ours.close()
    theirs.close()


def test_requests_that_leave_before_their_turn() -> None:
    compilations, go = Compilations(), threading.Event()
    running = [compilations.submit(lambda key: go.wait(SECONDS) and Grammar(), key) for key in range(AT_ONCE)]
    waiting = compilations.submit(lambda key: Grammar(), "later")
    waiting.cancel()
    assert compilations.numbered(AT_ONCE) is not None and compilations.numbered(AT_ONCE + 1) is None
    assert waiting.cancelled() and not any(future.done() for future in running)
    go.set()
    until(lambda: all(future.done() for future in running))


@pytest.mark.parametrize("is_first", [True, False], ids=["first rank", "another rank"])
def test_a_compilation_that_is_stopped_is_not_said_to_be_too_large(
    is_first: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Nor to be invalid, which SGLang says of a grammar that raises ``RuntimeError``."""
    caplog.set_level(logging.INFO)
    compilations, tokenizer, begun = Compilations(), xgrammar.TokenizerInfo(["a", "b", "</s>"]), threading.Event()
    process, raised = CompilerProcess(), []
    process.use(tokenizer)

    def source(compilation: Compilation, text: str) -> bytes:
        begun.set()
        return process.compile(compilation, text) if is_first else follow(compilation, text)

    def compile(regex: str) -> Any:
        try:
            return Compiler(tokenizer, compilations, source).compile_regex(regex)
        except Exception as error:
            raised.append(error)
            raise

    waiting = compilations.submit(compile, "a?" * 3000)  # takes half a minute
    assert begun.wait(SECONDS)
    waiting.cancel()
    until(lambda: bool(caplog.messages))
    process.close()
    assert caplog.messages == [f"nvfp4_sgl: {ALL_LEFT}"] and [type(error) for error in raised] == [Stopped]


def test_an_error_is_everyones() -> None:
    compilations, go = Compilations(), threading.Event()

    def compile(key: str) -> Grammar:
        assert go.wait(SECONDS)
        raise RuntimeError(key)

    futures = [compilations.submit(compile, "bad") for _ in range(3)]
    go.set()
    for future in futures:
        with pytest.raises(RuntimeError, match="bad"):
            future.result(SECONDS)
