"""Messages through shared memory: what is sent arrives everywhere, who waits sleeps, and no one waits for the dead."""

from __future__ import annotations

import contextlib
import os
import pickle
import random
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from nvfp4_sgl.errors import UnsupportedError
from nvfp4_sgl.serving import broadcast, shared_requests
from nvfp4_sgl.serving.broadcast import SLOT_BYTES, SLOTS, Broadcast, ProcessEnded, memory_bytes
from nvfp4_sgl.serving.sglang import hooking, parallel, settings
from nvfp4_sgl.serving.shared_requests import Requests, attach, open_memory

READERS = 3
SECONDS = 30
"""Most that a test waits."""


@pytest.fixture
def descriptor() -> Iterator[int]:
    found = os.memfd_create("test")
    os.ftruncate(found, memory_bytes(READERS))
    yield found
    os.close(found)


@pytest.fixture
def writer(descriptor: int) -> Broadcast:
    return Broadcast(descriptor, READERS, None)


@pytest.fixture
def readers(descriptor: int) -> list[Broadcast]:
    return [Broadcast(descriptor, READERS, reader) for reader in range(READERS)]


@contextlib.contextmanager
def child(run: Callable[[], object]) -> Iterator[int]:
    """A process that calls ``run`` and ends."""
    process = os.fork()
    if process == 0:
        with contextlib.suppress(BaseException):
            run()
        os._exit(0)
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(process, 0)


def test_every_reader_gets_every_message(writer: Broadcast, readers: list[Broadcast]) -> None:
    """Of any length, empty ones too, by readers of any pace; more than there are slots."""
    draw = random.Random(2)
    lengths = (0, 1, 7, 4000, SLOT_BYTES, SLOT_BYTES + 1, 3 * SLOT_BYTES, (SLOTS + 3) * SLOT_BYTES + 5)
    sent = [draw.randbytes(length) for length in [*lengths, *draw.choices(lengths[:4], k=300), *lengths]]

    def read(reader: int) -> list[bytes]:
        pauses = random.Random(reader)
        found = []
        for _ in sent:
            if pauses.random() < 0.05:
                time.sleep(0.003 * reader)
            found.append(readers[reader].receive())
        return found

    with ThreadPoolExecutor(READERS) as threads:
        reading = [threads.submit(read, reader) for reader in range(READERS)]
        for message in sent:
            writer.send(message)
        assert all(each.result(SECONDS) == sent for each in reading)


def test_the_writer_waits_for_the_slowest(writer: Broadcast, readers: list[Broadcast]) -> None:

    def send() -> None:
        for n in range(SLOTS + 1):
            writer.send(bytes([n]))

    with ThreadPoolExecutor(1) as threads:
        sending = threads.submit(send)
        for reader in readers[1:]:
            assert [reader.receive() for _ in range(SLOTS)] == [bytes([n]) for n in range(SLOTS)]
        time.sleep(0.05)
        assert not sending.done()
        assert readers[0].receive() == b"\0"
        sending.result(SECONDS)
    assert [readers[0].receive() for _ in range(SLOTS)] == [bytes([n + 1]) for n in range(SLOTS)]


def test_who_waits_sleeps(writer: Broadcast, readers: list[Broadcast]) -> None:
    """An idle rank takes a small part of a core, and is there when something comes."""

    def wait() -> tuple[bytes, float]:
        before = time.thread_time()
        return readers[0].receive(), time.thread_time() - before

    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(wait)
        time.sleep(1)
        writer.send(b"message")
        message, seconds = waiting.result(SECONDS)
    assert message == b"message" and seconds < 0.25


def test_a_reader_does_not_wait_for_a_writer_that_is_dead(descriptor: int) -> None:
    """What it has sent before still arrives."""
    reader = Broadcast(descriptor, 1, 0)
    with child(lambda: Broadcast(descriptor, 1, None).send(b"last words")) as process:
        reader.others = [process]
        assert reader.receive() == b"last words"
        with pytest.raises(ProcessEnded, match=f"process {process}"):
            reader.receive()


def test_a_writer_does_not_wait_for_a_reader_that_is_dead(descriptor: int) -> None:
    writer = Broadcast(descriptor, 1, None)
    with child(lambda: Broadcast(descriptor, 1, 0).receive()) as process:
        writer.others = [process]
        with pytest.raises(ProcessEnded, match=f"process {process}"):
            for _ in range(SLOTS + 2):
                writer.send(b"")
    assert broadcast.has_ended(process)


def test_a_process_that_is_slow_is_waited_for(descriptor: int) -> None:
    """Longer than until it is looked for."""

    def late() -> None:
        time.sleep(3 * broadcast.LOOK_SECONDS)
        Broadcast(descriptor, 1, None).send(b"late")

    reader = Broadcast(descriptor, 1, 0)
    with child(late) as process:
        reader.others = [process]
        assert reader.receive() == b"late"


# --- requests -------------------------------------------------------------------------------------------------------


def refuse(*_: Any, **__: Any) -> Any:
    pytest.fail("SGLang's broadcast is not called")


def test_requests_of_a_step(writer: Broadcast, readers: list[Broadcast]) -> None:
    """The first rank's own aborts go with the requests; those that other ranks decide do not."""
    first, others = Requests(writer), [Requests(reader) for reader in readers]
    steps: list[tuple[list[Any], list[Any] | None]] = [([], None), ([{"rid": "a"}, ("b", [1] * 50000)], ["abort"])]
    for received, local in (*steps, ([], []), ([], ["abort"])):
        expected = [*received, *(local or [])]
        assert first.share(refuse, None, received, local) == expected
        for other in others:
            assert other.share(refuse, None, None, ["another"]) == expected


def test_a_step_without_requests_pickles_nothing(
    writer: Broadcast, readers: list[Broadcast], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("dumps", "loads"):
        monkeypatch.setattr(pickle, name, refuse)
    assert Requests(writer).share(refuse, None, []) == Requests(readers[0]).share(refuse, None, None) == []


def test_ranks_find_the_first_ones_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []

    def exchange(value: Any) -> list[Any]:
        told.append(value)
        return [told[0], (11, -1, b""), (12, -1, b"")]

    ends = []
    for rank in range(3):
        monkeypatch.setattr(parallel, "tp_rank", lambda rank=rank: rank)
        monkeypatch.setattr(parallel, "tp_size", lambda: 3)
        monkeypatch.setattr(parallel, "tp_exchange", exchange)
        ends.append(open_memory())
    assert [list(end.others) for end in ends] == [[11, 12], [os.getpid()], [os.getpid()]]
    ends[0].send(b"hello")
    assert [end.receive() for end in ends[1:]] == [b"hello"] * 2


def test_another_memory_is_refused(descriptor: int, writer: Broadcast, tmp_path: Path) -> None:
    """Another key, another size, no file; the remedy is in the message, and works."""
    writer.key[:] = b"k" * broadcast.KEY_BYTES
    path = f"/proc/self/fd/{descriptor}"
    assert isinstance(attach(path, b"k" * broadcast.KEY_BYTES, READERS, 0), Broadcast)
    small = tmp_path / "small"
    small.write_bytes(b"k" * 100)
    for where, key in ((path, b"x" * broadcast.KEY_BYTES), (small, b"k" * 16), (tmp_path / "none", b"k" * 16)):
        with pytest.raises(UnsupportedError, match=f"{where}: expected the memory .* {shared_requests.SWITCH}=0"):
            attach(str(where), key, READERS, 0)


@pytest.mark.parametrize(
    ("ranks", "switch", "way"), [(1, True, "one rank"), (2, True, "shared memory"), (2, False, "sockets")]
)
def test_the_switch(ranks: int, switch: bool, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    installed: list[str] = []
    monkeypatch.setattr(parallel, "tp_size", lambda: ranks)
    monkeypatch.setattr(settings, "environment_flag", lambda name: name == shared_requests.SWITCH and switch)
    monkeypatch.setattr(shared_requests, "open_memory", lambda: None)
    monkeypatch.setattr(hooking, "install_hooks", installed.extend)
    shared_requests.share()
    assert shared_requests.way() == way
    assert installed == ["share_requests"] * (way == "shared memory")
