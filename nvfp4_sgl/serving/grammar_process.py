"""The process in which grammars are compiled, so that one takes its own time and memory and no other request's.

It is forked from the scheduler while that has one thread, and forks a child for each grammar. It ends a child whose
connection the scheduler closes (the client has left, or time is up), and ends with the scheduler. Nothing of SGLang
is used here. ``python -m nvfp4_sgl.serving.grammar_process FILE`` is such a process, too, in place of one that died.

Messages on ``control`` are :data:`TOKENIZER` or :data:`COMPILE` with one connection; what is on that ends where the
sender shuts it down. A child answers :data:`COMPILED` or :data:`REFUSED` and text. An answer of nothing means that the
child was ended.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy
import setproctitle
import xgrammar

MAX_BYTES = 768 << 20
"""Bound on what a child may have of its own memory. A large schema and a vocabulary of 129280 tokens take 0.3 GiB."""

MAX_COMPILED_CHARACTERS = 48 << 20
"""Bound on a compiled grammar as text. The scheduler needs up to ten times as much for a moment to read it."""

MAX_MASK_SECONDS = 0.25
"""Bound on one mask. Those of JSON schemas and regular expressions take about a millisecond."""

NO_TOKEN = "the grammar allows no token here; does a rule refer to nothing but itself?"
AMBIGUOUS = f"the grammar is too ambiguous: one token took more than {MAX_MASK_SECONDS} s"
ADVICE = "make it smaller, with fewer repetitions and alternatives"
TOO_MUCH_MEMORY = f"compiling the grammar takes more than {MAX_BYTES >> 20} MiB, or ends xgrammar; {ADVICE}"
TOO_LARGE = f"the compiled grammar takes more than {MAX_COMPILED_CHARACTERS >> 20} MiB; {ADVICE}"

TITLE, CHILD_TITLE = "nvfp4-sgl::grammars", "nvfp4-sgl::grammar"
"""Names of the process and of its children in ``ps``."""

TOKENIZER, COMPILE = b"tokenizer", b"compile"
COMPILED, REFUSED = b"+", b"-"

PIECE = 1 << 20
"""Bytes read at once."""
SET_DEATH_SIGNAL = 1
"""Option of Linux's ``prctl``."""
NICENESS = 10
"""The scheduler and other requests come first."""


@dataclass(frozen=True)
class Child:
    """A process that compiles one grammar."""

    pid: int
    connection: socket.socket
    """The child's end of its connection, which is hung up when the scheduler closes the other."""
    lifeline: int
    """File that is hung up when the child has ended."""


def main() -> NoReturn:
    """Serve the connection that the command line names."""
    serve(socket.socket(fileno=int(sys.argv[1])))


def fork() -> tuple[int, socket.socket]:
    """Fork :func:`serve`: its process id and the connection to it. Only for a process of one thread."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        close_all_but((theirs.fileno(),))
        end_with(parent)
        serve(theirs)
    theirs.close()
    return pid, ours


def serve(control: socket.socket) -> NoReturn:
    """Fork a child for each grammar that comes over ``control``, until the scheduler has ended."""
    code = 1
    try:
        name_process(TITLE)
        for number in (signal.SIGINT, signal.SIGTERM):  # which may go to all of a terminal's or a service's processes
            signal.signal(number, signal.SIG_IGN)
        Children(control).run()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


class Children:
    """The children of this process."""

    def __init__(self, control: socket.socket) -> None:
        self._control, self._tokenizer = control, None
        self._children: dict[int, Child] = {}
        self._poll = select.poll()
        self._poll.register(control, select.POLLIN)

    def run(self) -> None:
        """Return when ``control`` is closed, with no child left."""
        while True:
            events = [file for file, _ in self._poll.poll()]
            for file in events:
                if (child := self._children.get(file)) is not None:
                    self._end(child)
            # Last: a new child's files may have the numbers of those just closed.
            if self._control.fileno() in events and not self._take():
                break
        for child in list(self._children.values()):
            if child.lifeline in self._children:
                self._end(child)

    def _take(self) -> bool:
        """Do what a message says; whether there was one."""
        try:
            message, files, _, _ = socket.recv_fds(self._control, 64, 1)
        except ConnectionError:
            return False
        if not message:
            return False
        connection = socket.socket(fileno=files[0])
        if message == TOKENIZER:
            with connection:
                self._tokenizer = xgrammar.TokenizerInfo.deserialize_json(read_all(connection).decode())
        else:
            self._start(connection)
        return True

    def _start(self, connection: socket.socket) -> None:
        ours, theirs = os.pipe()
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            # A copy of another child's connection would keep the scheduler from seeing that one's end.
            close_all_but((connection.fileno(), theirs))
            try:
                end_with(parent)
                limit()
                connection.sendall(compiled(read_all(connection).decode(), self._tokenizer))
            finally:
                os._exit(0)
        os.close(theirs)
        child = Child(pid, connection, ours)
        for file in (connection.fileno(), ours):
            self._children[file] = child
            self._poll.register(file, 0)  # only hanging up

    def _end(self, child: Child) -> None:
        for file in (child.connection.fileno(), child.lifeline):
            self._poll.unregister(file)
            del self._children[file]
        os.kill(child.pid, signal.SIGKILL)  # one that has ended is still there to be waited for
        os.waitpid(child.pid, 0)
        child.connection.close()
        os.close(child.lifeline)


def compiled(text: str, tokenizer: Any) -> bytes:
    """The answer to ``text``, a method of xgrammar's compiler and its arguments as JSON."""
    try:
        method, arguments = json.loads(text)
        compiler = xgrammar.GrammarCompiler(tokenizer, max_threads=min(8, os.cpu_count() or 1), cache_enabled=False)
        grammar = getattr(compiler, method)(**arguments)
        if (message := first_mask_fault(grammar, tokenizer.vocab_size)) is None:
            result = grammar.serialize_json().encode()
            if len(result) <= MAX_COMPILED_CHARACTERS:
                return COMPILED + result
            message = TOO_LARGE
    except MemoryError:
        message = TOO_MUCH_MEMORY
    except Exception as error:
        message = TOO_MUCH_MEMORY if "bad_alloc" in str(error) else str(error)
    return REFUSED + message.encode(errors="replace")


def first_mask_fault(grammar: Any, vocab_size: int) -> str | None:
    """Why no text can begin under a compiled grammar, or ``None``."""
    mask = numpy.full((1, -(-vocab_size // 32)), -1, dtype=numpy.int32)
    started = time.thread_time()
    xgrammar.GrammarMatcher(grammar).fill_next_token_bitmask(mask, 0)
    if time.thread_time() - started > MAX_MASK_SECONDS:
        return AMBIGUOUS
    return None if mask.any() else NO_TOKEN


def limit() -> None:
    """Bound this process's memory, and let others and the system's memory killer treat it accordingly."""
    name_process(CHILD_TITLE)
    most = data_bytes() + MAX_BYTES
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.nice(NICENESS)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    nowhere = os.open(os.devnull, os.O_RDWR)
    for file in (0, 1, 2):  # what ends xgrammar is the request's answer, not the server's log
        os.dup2(nowhere, file)


def data_bytes() -> int:
    """Memory of this process that counts towards its limit."""
    status = Path("/proc/self/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmData:")).split()[1]) << 10


def name_process(title: str) -> None:
    """Name this process in ``ps`` and ``top``."""
    setproctitle.setproctitle(title)


def end_with(parent: int) -> None:
    """Have the kernel end this process with ``parent``, which has forked it."""
    if ctypes.CDLL(None, use_errno=True).prctl(SET_DEATH_SIGNAL, int(signal.SIGKILL), 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:
        os._exit(0)


def close_all_but(files: Collection[int]) -> None:
    """Close every file of this process but ``files``, standard input, output and error."""
    for file in [int(found.name) for found in Path("/proc/self/fd").iterdir()]:
        if file > 2 and file not in files:
            with contextlib.suppress(OSError):  # the listing itself was one
                os.close(file)


def read_all(connection: socket.socket) -> bytes:
    """Bytes that come until the sender shuts the connection down."""
    parts = []
    while part := connection.recv(PIECE):
        parts.append(part)
    return b"".join(parts)


if __name__ == "__main__":
    main()
