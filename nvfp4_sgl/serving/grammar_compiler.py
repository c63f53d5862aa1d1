"""Compiles the grammars of requests apart from the scheduler, and within bounds of time and memory.

:class:`Compiler` takes the place of xgrammar's compiler in SGLang's grammar backend. A thread of
:mod:`nvfp4_sgl.serving.grammar_compilations` calls it, and waits for :mod:`nvfp4_sgl.serving.grammar_process`.

With several ranks the first one compiles. The others take its outcomes, so that none uses a clock of its own: they are
sent where SGLang's ranks agree on which grammars are ready, by a number that all ranks count alike.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import xgrammar

from nvfp4_sgl.serving import grammar_process as process
from nvfp4_sgl.serving.grammar_compilations import MAX_SECONDS, Compilation, Compilations, Stopped
from nvfp4_sgl.serving.requests import serves_our_model
from nvfp4_sgl.serving.sglang import grammar_manager, settings

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.0005
"""How long the scheduler waits for grammars before each step of running requests, instead of SGLang's 5 ms."""

TOO_SLOW = f"compiling the grammar takes more than {MAX_SECONDS:.0f} s; {process.ADVICE}"
BUSY = f"the server has been compiling other grammars for {MAX_SECONDS:.0f} s; send the request again"
ALL_LEFT = "a grammar's compilation was stopped: all requests that waited for it were aborted, or their clients left"


class Compiler:
    """The part of xgrammar's compiler that SGLang calls; each method returns a compiled grammar.

    It raises ``RuntimeError`` for a grammar that is refused, which SGLang logs as invalid, and :class:`Stopped`.

    Args:
        tokenizer_info: xgrammar's.
        source: gives the outcome of a compilation, the text that :mod:`grammar_process` takes; nothing if it stopped.
    """

    def __init__(
        self, tokenizer_info: Any, compilations: Compilations, source: Callable[[Compilation, str], bytes]
    ) -> None:
        self._tokenizer_info, self._compilations, self._source = tokenizer_info, compilations, source
        self._reading = threading.Lock()

    def compile_builtin_json_grammar(self) -> Any:
        return self._compile("compile_builtin_json_grammar")

    def compile_json_schema(self, schema: str, any_whitespace: bool, max_whitespace_cnt: int | None) -> Any:
        return self._compile(
            "compile_json_schema", schema=schema, any_whitespace=any_whitespace, max_whitespace_cnt=max_whitespace_cnt
        )

    def compile_regex(self, regex: str) -> Any:
        return self._compile("compile_regex", regex=regex)

    def compile_grammar(self, grammar: str) -> Any:
        return self._compile("compile_grammar", grammar=grammar)

    def compile_structural_tag(self, tag: Any) -> Any:
        text = tag if isinstance(tag, str) else tag.model_dump_json()
        return self._compile("compile_structural_tag", structural_tag=text)

    def clear_cache(self) -> None:
        """Do nothing: SGLang caches compiled grammars."""

    def _compile(self, method: str, **arguments: Any) -> Any:
        outcome = self._source(self._compilations.current(), json.dumps([method, arguments]))
        if not outcome:
            raise Stopped(ALL_LEFT)
        kind, text = outcome[:1], outcome[1:].decode()
        if kind != process.COMPILED:
            raise RuntimeError(text)
        with self._reading:  # it takes several times the text's memory
            return xgrammar.CompiledGrammar.deserialize_json(text, self._tokenizer_info)


class CompilerProcess:
    """The first rank's side: the process that compiles, and the outcomes that other ranks do not know yet.

    To be built while the scheduler has one thread: then the process is forked from it, which takes no time.
    """

    def __init__(self) -> None:
        self.outcomes: deque[tuple[int, bytes]] = deque()
        self._tokenizer = b""
        self._lock = threading.Lock()
        threads = len(list(Path("/proc/self/task").iterdir()))
        self._pid, self._control = process.fork() if threads == 1 else spawn()

    def use(self, tokenizer_info: Any) -> None:
        """Compile for that vocabulary from now on."""
        self._tokenizer = tokenizer_info.serialize_json().encode()
        self._send_tokenizer()

    def close(self) -> None:
        """End the process."""
        self._control.close()

    def compile(self, compilation: Compilation, text: str) -> bytes:
        """Compile; returns the outcome, which other ranks receive, too."""
        try:
            outcome = self._answer(compilation, text.encode())
        except OSError as error:
            logger.exception("nvfp4_sgl: no process compiles grammars")
            outcome = process.REFUSED + f"the server cannot compile grammars now: {error}".encode()
        self.outcomes.append((compilation.number, outcome))
        return outcome

    def _answer(self, compilation: Compilation, text: bytes) -> bytes:
        left = compilation.deadline - time.monotonic()
        late = process.REFUSED + (TOO_SLOW if left > MAX_SECONDS / 2 else BUSY).encode()
        answer = b""
        try:
            while not answer and not compilation.stopped:
                control, connection = self._connect(compilation)
                with connection, contextlib.suppress(ConnectionError):
                    compilation.watch(connection)
                    answer = exchange(connection, text, compilation.deadline)
                if control is self._control and not is_hung_up(control):
                    break  # the child alone was ended
        except TimeoutError:
            return late
        if not answer and not compilation.stopped:
            return process.REFUSED + process.TOO_MUCH_MEMORY.encode()
        return answer

    def _connect(self, compilation: Compilation) -> tuple[socket.socket, socket.socket]:
        """Connections to the process, another one if it has ended, and for the text to compile."""
        with self._lock:
            if is_hung_up(self._control):
                logger.warning("nvfp4_sgl: process %s, which compiles grammars, has ended; another starts", self._pid)
                self._control.close()
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(self._pid, 0)
                self._pid, self._control = spawn()
                self._send_tokenizer()
                compilation.deadline = time.monotonic() + MAX_SECONDS
            return self._control, self._send(process.COMPILE)

    def _send(self, message: bytes) -> socket.socket:
        """Send ``message``; returns the connection for what it announces."""
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                socket.send_fds(self._control, [message], [theirs.fileno()])
            except OSError:
                ours.close()
                raise
        return ours

    def _send_tokenizer(self) -> None:
        """Send the tokenizer; returns when it has been read."""
        with self._send(process.TOKENIZER) as connection:
            connection.sendall(self._tokenizer)
            connection.shutdown(socket.SHUT_WR)
            connection.recv(1)


def spawn() -> tuple[int, socket.socket]:
    """Start :mod:`grammar_process` in an interpreter of its own: its process id and the connection to it."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        file = theirs.fileno()
        pid = subprocess.Popen([sys.executable, "-m", process.__name__, str(file)], pass_fds=[file]).pid
    return pid, ours


def is_hung_up(connection: socket.socket) -> bool:
    """Whether the process at the other end has ended."""
    poll = select.poll()
    poll.register(connection, 0)
    return bool(poll.poll(0))


def exchange(connection: socket.socket, text: bytes, deadline: float) -> bytes:
    """The answer to ``text``; :class:`TimeoutError` after ``deadline``, on the clock of :func:`time.monotonic`."""

    def bound() -> None:
        if (left := deadline - time.monotonic()) <= 0:
            raise TimeoutError
        connection.settimeout(left)

    bound()
    connection.sendall(text)
    connection.shutdown(socket.SHUT_WR)
    parts = [b"-"]
    while parts[-1]:
        bound()
        parts.append(connection.recv(process.PIECE))
    return b"".join(parts[1:])


def follow(compilation: Compilation, text: str) -> bytes:
    """The first rank's outcome, on another rank."""
    return compilation.outcome.get()


class Ranks:
    """Compiles for a scheduler, in step with its other ranks.

    Args:
        started: the process that compiles; on the first rank alone.
    """

    def __init__(self, manager: Any, started: CompilerProcess | None) -> None:
        self._compilations, self._process = Compilations(), started
        tokenizer_info = grammar_manager.grammar_tokenizer(manager)
        if started is not None:
            started.use(tokenizer_info)
        compiler = Compiler(tokenizer_info, self._compilations, follow if started is None else started.compile)
        grammar_manager.use_grammar_compiler(manager, self._compilations, compiler)

    def step(self, manager: Any) -> None:
        """Send the first rank's outcomes to the others."""
        outcomes = []
        while self._process is not None and self._process.outcomes:
            outcomes.append(self._process.outcomes.popleft())
        for number, outcome in grammar_manager.from_first_rank(manager, outcomes):
            if self._process is None and (compilation := self._compilations.numbered(number)) is not None:
                compilation.outcome.put(outcome)

    def keep(self, waiting: Collection[Any]) -> None:
        """As :meth:`Compilations.keep`."""
        self._compilations.keep(waiting)


_process: CompilerProcess | None = None
_ranks: Ranks | None = None


def prepare() -> None:
    """Called on the first rank before its scheduler is built: start the process that compiles."""
    global _process
    if settings.resolved("grammar_backend") != "none":
        _process = CompilerProcess()


def start(original: Callable[..., None], manager: Any, *args: Any, **kwargs: Any) -> None:
    """Hook around the construction of SGLang's queue of grammars."""
    global _ranks
    original(manager, *args, **kwargs)
    if not serves_our_model():
        return
    if grammar_manager.has_grammars(manager):
        _ranks = Ranks(manager, _process)
    elif _process is not None:
        _process.close()


def take_ready(original: Callable[..., Any], manager: Any) -> Any:
    """Hook around the taking of requests whose grammar is ready from SGLang's queue, on all ranks at once."""
    if _ranks is None:
        return original(manager)
    _ranks.step(manager)
    grammar_manager.wait_for_grammars(manager, POLL_SECONDS)
    ready = original(manager)
    _ranks.keep(grammar_manager.waiting_grammars(manager))
    return ready
