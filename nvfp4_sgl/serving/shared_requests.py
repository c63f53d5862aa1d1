"""Hands the requests of each step to all ranks through shared memory, not by a broadcast over sockets.

With several tensor-parallel ranks the first one receives requests, and every step begins with handing them to the
others; most steps have none. SGLang does so by gloo. All ranks are processes of one host (``--nnodes`` is refused).

SGLang has a ring in shared memory, too. Its readers spin while nothing comes, a core each, also with
``--sleep-on-idle``, and wait for ever for a rank that has died. Its switch, ``SGLANG_USE_MESSAGE_QUEUE_BROADCASTER=0``,
brings gloo back, to compare the two and where the memory cannot be shared.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import secrets
from collections.abc import Callable
from typing import Any

from nvfp4_sgl.errors import UnsupportedError
from nvfp4_sgl.serving.broadcast import KEY_BYTES, Broadcast, memory_bytes
from nvfp4_sgl.serving.sglang import hooking, parallel, settings

SWITCH = "SGLANG_USE_MESSAGE_QUEUE_BROADCASTER"


def way() -> str:
    """The way on which requests come to this scheduler's ranks."""
    if parallel.tp_size() == 1:
        return "one rank"
    return "shared memory" if settings.environment_flag(SWITCH) else "sockets"


def share() -> None:
    """Let this scheduler have its requests in its :func:`way`; all ranks call this at once."""
    if way() == "shared memory":
        hooking.install_hooks({"share_requests": Requests(open_memory()).share})


class Requests:
    """Requests of each step, from the first rank to the others."""

    def __init__(self, memory: Broadcast):
        self._memory = memory

    def share(self, original: Callable[..., Any], receiver: Any, received: Any, local: Any = None) -> list[Any]:
        """Hook around SGLang's broadcast: the requests of this step, on every rank.

        Args:
            received: a list on the first rank, else ``None``. local: aborts that this rank has decided; the first's go
                with the requests.
        """
        if received is None:
            message = self._memory.receive()
            return list(pickle.loads(message)) if message else []
        requests = [*received, *(local or ())]
        self._memory.send(pickle.dumps(requests) if requests else b"")
        return requests


def open_memory() -> Broadcast:
    """This rank's end; all ranks call this at once.

    Raises:
        UnsupportedError: the first rank's memory cannot be opened.
    """
    rank, readers = parallel.tp_rank(), parallel.tp_size() - 1
    descriptor, key = -1, b""
    if rank == 0:
        # Without a name: nothing stays behind however the server ends, and the size of /dev/shm does not matter.
        descriptor, key = os.memfd_create("nvfp4_sgl requests"), secrets.token_bytes(KEY_BYTES)
        os.ftruncate(descriptor, memory_bytes(readers))
        memory = Broadcast(descriptor, readers, None)
        memory.key[:] = key
    ranks = parallel.tp_exchange((os.getpid(), descriptor, key))
    if rank > 0:
        process, theirs, key = ranks[0]
        memory = attach(f"/proc/{process}/fd/{theirs}", key, readers, rank - 1)
    memory.others = [process for process, _, _ in (ranks[1:] if rank == 0 else ranks[:1])]
    return memory


def attach(path: str, key: bytes, readers: int, reader: int) -> Broadcast:
    """A reader's end of the memory at ``path``, which begins with ``key``.

    Raises:
        UnsupportedError: it cannot be opened, or is another one.
    """
    why = "another file"
    try:
        descriptor = os.open(path, os.O_RDWR)
        with contextlib.closing(os.fdopen(descriptor, "r+b", buffering=0)):
            if os.fstat(descriptor).st_size == memory_bytes(readers):
                memory = Broadcast(descriptor, readers, reader)
                if bytes(memory.key) == key:
                    return memory
    except OSError as error:
        why = f"{type(error).__name__}: {error}"
    raise UnsupportedError(
        f"{path}: expected the memory of rank 0 for requests, found {why};"
        f" let ranks read each other's /proc, or set {SWITCH}=0 for sockets"
    )
