"""A process from which servers are forked: it has imported what each of a server's processes imports.

``python -m sglang.launch_server`` and each process that it spawns (scheduler, detokenizer) spend most of their CPU time
on imports. This script, run by :class:`tests.support.forks.Template`, spends them once. What is forked is a server's
process as it would be of itself:

* Plugins and hooks are loaded in each process, as always: this one has imported their modules at most. A launcher that
  starts of itself imports most of SGLang after its plugins and hooks; a scheduler and a detokenizer import it before,
  as all do here. Where the command line names no modules, a launcher's order is kept, too.
* A forked launcher runs SGLang's module as ``__main__`` in a session of its own, as a child of this process.
* Where it would spawn a process, a twin of the launcher that was forked before it ran forks that process, which is then
  adopted by the launcher: the same parent, session, limits, blocked signals, environment and inherited files.
  ``multiprocessing`` does everything else itself, pickling included.

The environment is that of this process, since modules read theirs when they are imported. Otherwise than in a server
that starts of itself, all processes of one template share the seed of ``hash``, and what a process imports here cannot
see the variables that its launcher sets for it. So some servers start of themselves. Planted faults are made after the
fork, before the launcher and its twin part: servers with faults and without are forked from one process.

Requests and answers are JSON lines on stdin and stdout.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import multiprocessing.util
import os
import resource
import runpy
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SERVER = "sglang.launch_server"
PACKAGES = (
    *("torch._inductor.compile_fx", "torch._dynamo.repro.after_dynamo", "flashinfer.comm", "openai.types.responses"),
    *("openai.types.realtime", "transformers.modeling_layers", "transformers.modeling_gguf_pytorch_utils"),
    *("compressed_tensors.config", "fastapi", "aiohttp.web", "xgrammar", "triton_kernels.tensor", "IPython.display"),
    *("torchcodec.decoders", "uvicorn", "gguf"),
)
"""Modules of others that a launcher, scheduler or detokenizer imports after ``SERVER``, of 20 ms and more.

Not ``prometheus_client``: it reads, when it is imported, a variable that the launcher sets.
"""
FAULTS = Path(__file__).with_name("planted_faults") / "sitecustomize.py"
LIMITS = tuple(getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_"))
SET_DEATH_SIGNAL, SET_CHILD_SUBREAPER = 1, 36
"""Options of ``prctl``."""
LARGEST_MESSAGE = 1 << 18
MOST_FILES = 253
"""Most files that Linux passes on in one message."""
FIRST_FREE_FILE = 1000
"""Above the numbers of files that a launcher passes on."""


def main() -> None:
    """Import, then fork a launcher for each request; a forked process returns from here when it has ended."""
    sys.path[0] = str(Path.cwd())  # not this script's folder, whose modules are none of a server's
    requests, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import_all(sys.argv[1:])
    for line in requests:
        request = json.loads(line)
        if "wait" in request:
            pid, status = os.waitpid(request["wait"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if pid else None
        else:
            answer = os.fork()
            if answer == 0:
                requests.close()
                answers.close()
                run_launcher(request)
                return
        print(json.dumps(answer), file=answers, flush=True)


def import_all(modules: Sequence[str]) -> None:
    """Without collecting garbage, of which there is none: a quarter of the time."""
    gc.disable()
    import setproctitle

    setproctitle.getproctitle()  # finds the place of the title now: later there are variables beside it no more
    for name in (SERVER, *PACKAGES, *modules):
        importlib.import_module(name)
    gc.freeze()  # a collection in a fork would copy all of it
    gc.enable()
    threads = list(Path("/proc/self/task").iterdir())
    assert len(threads) == 1, f"{len(threads)} threads after imports: a fork would lack all but one"


def run_launcher(request: dict[str, Any]) -> None:
    """Become the launcher of a server."""
    os.setsid()
    redirect(0, os.devnull, os.O_RDONLY)
    redirect(1, request["log"], os.O_WRONLY | os.O_APPEND)
    os.dup2(1, 2)
    os.chdir(request["directory"])
    sys.path[0] = request["directory"]  # as ``python -m`` does
    os.environ.update(request["environment"])
    if "PLANTED_FAULT" in request["environment"]:
        runpy.run_path(str(FAULTS))
    reseed()
    launcher, twin = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = os.getpid()
    if os.fork() == 0:
        launcher.close()
        serve_as_twin(twin, pid)
        return
    twin.close()
    control_process(SET_CHILD_SUBREAPER, 1)
    fork_instead_of_spawning(launcher)
    sys.orig_argv = [sys.executable, "-m", SERVER, *request["arguments"]]
    sys.argv = [SERVER, *request["arguments"]]
    runpy.run_module(SERVER, run_name="__main__", alter_sys=True)


def redirect(file: int, path: str, flags: int) -> None:
    opened = os.open(path, flags)
    os.dup2(opened, file)
    os.close(opened)


def reseed() -> None:
    """``random`` does so by itself."""
    import numpy

    numpy.random.seed()


def control_process(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value})")


# --- processes that the launcher spawns ---------------------------------------------------------------------------


def fork_instead_of_spawning(twin: socket.socket) -> None:
    """Have ``multiprocessing`` of this launcher ask the twin for its processes.

    The tracker of its resources, which ``multiprocessing`` starts in the same way, is spawned: it imports little.
    """
    spawn, lock = multiprocessing.util.spawnv_passfds, threading.Lock()

    def ask(path: bytes, arguments: Sequence[Any], files: Sequence[int]) -> int:
        if os.fsdecode(path) != sys.executable or arguments[-1] != "--multiprocessing-fork":
            return spawn(path, arguments, files)
        message = {
            "arguments": [os.fsdecode(argument) for argument in arguments],
            "environment": dict(os.environ),
            "directory": str(Path.cwd()),
            "limits": [resource.getrlimit(limit) for limit in LIMITS],
            "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
            "files": list(files),
        }
        with lock:
            socket.send_fds(twin, [json.dumps(message).encode()], files)
            return int(twin.recv(LARGEST_MESSAGE))

    multiprocessing.util.spawnv_passfds = ask  # type: ignore[assignment]


def serve_as_twin(launcher: socket.socket, pid: int) -> None:
    """Fork what the launcher asks for until it ends; a forked process returns from here when it has ended.

    A forked process has no parent any more when the one between has ended, and is the launcher's from then on.
    """
    control_process(SET_DEATH_SIGNAL, signal.SIGKILL)
    while os.getppid() == pid:
        text, files, _, _ = socket.recv_fds(launcher, LARGEST_MESSAGE, MOST_FILES)
        if not text:
            break
        between = os.fork()
        if between == 0:
            if os.fork():
                os._exit(0)
            while os.getppid() != pid:
                time.sleep(0.001)
            launcher.send(str(os.getpid()).encode())
            launcher.close()
            run_spawned(json.loads(text), files)
            return
        os.waitpid(between, 0)
        for file in files:
            os.close(file)
    os._exit(0)


def run_spawned(message: dict[str, Any], files: Sequence[int]) -> None:
    """Become the process of that command line: ``python -c CODE --multiprocessing-fork``."""
    import fcntl

    moved = [fcntl.fcntl(file, fcntl.F_DUPFD, FIRST_FREE_FILE) for file in files]
    for file in files:
        os.close(file)
    for file, number in zip(moved, message["files"], strict=True):
        os.dup2(file, number)
        os.close(file)
    for limit, values in zip(LIMITS, message["limits"], strict=True):
        resource.setrlimit(limit, values)
    signal.pthread_sigmask(signal.SIG_SETMASK, message["blocked"])
    os.chdir(message["directory"])
    os.environ.clear()
    os.environ.update(message["environment"])
    reseed()
    sys.orig_argv = message["arguments"]
    sys.argv = ["-c", *message["arguments"][-1:]]
    sys.path[0] = ""
    exec(message["arguments"][-2], {"__name__": "__main__"})


if __name__ == "__main__":
    main()
