"""The server from Python: start SGLang on a checkpoint, ask through the OpenAI client, stop it.

python examples/server.py CHECKPOINT       # e.g. what `nvfp4-sgl tiny CHECKPOINT` writes
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from openai import OpenAI
from openai.types.chat import ChatCompletionUserMessageParam

READY_SECONDS = 600


@contextmanager
def running(checkpoint: Path, *arguments: str) -> Iterator[str]:
    """A ready server's address; it ends with the block.

    Args:
        checkpoint: a checkpoint directory.
        arguments: of ``sglang.launch_server``, such as ``--tp-size 2``.

    Raises:
        RuntimeError: the server ended, or was not ready in time; its output says why.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(checkpoint), "--port", str(port)]
    # A session of its own: stopping reaches every process of the server, and no other.
    process = subprocess.Popen([*command, *arguments], start_new_session=True)
    try:
        wait_until_ready(process, f"http://127.0.0.1:{port}")
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        try:
            process.wait(timeout=20)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # whoever is left


def wait_until_ready(process: subprocess.Popen[bytes], url: str) -> None:
    """Return when ``/health`` answers."""
    deadline = time.monotonic() + READY_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"the server ended with status {process.returncode} before it was ready")
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return
        except OSError:
            time.sleep(0.5)
    raise RuntimeError(f"the server was not ready after {READY_SECONDS} s")


def ask(url: str, **fields: Any) -> list[str]:
    """Print and return a chat answer, and a streamed one; ``fields`` are added to both requests."""
    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    question: ChatCompletionUserMessageParam = {"role": "user", "content": "What keeps sixteen values in nine bytes?"}
    settings: dict[str, Any] = {"model": "default", "messages": [question], "max_tokens": 16, "temperature": 0} | fields
    answer = client.chat.completions.create(**settings)
    chunks = client.chat.completions.create(**settings, stream=True)
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    answers = [answer.choices[0].message.content or "", streamed]
    print(*map(repr, answers), sep="\n")
    return answers


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python examples/server.py CHECKPOINT")
    with running(Path(sys.argv[1])) as address:
        ask(address)
