"""SGLang's own benchmark client in one process: importing it takes longer than most of what it measures.

``python -m benchmarks.client`` reads lines of arguments in JSON and runs the client with each; a line of its own says
when a run is over.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

OVER = "benchmarks.client: over"
POLL_SECONDS = 0.2
LOG_CHARACTERS = 4000
"""Characters of the client's output that an error quotes."""


class Client:
    """A running process; :meth:`run` measures with it.

    Args:
        log: where its output goes. seconds: a limit for each run, its imports included in the first.
    """

    def __init__(self, process: subprocess.Popen[bytes], log: Path, seconds: float) -> None:
        self._process, self._log, self._seconds, self._runs = process, log, seconds, 0

    def run(self, arguments: Sequence[str]) -> None:
        """Run the client with ``arguments``.

        Raises:
            RuntimeError: it ended, or is not over in time; with the end of its output.
        """
        assert self._process.stdin is not None
        self._runs += 1
        self._process.stdin.write(json.dumps(list(arguments)).encode() + b"\n")
        self._process.stdin.flush()
        begun = time.monotonic()
        while self._log.read_text().count(OVER) < self._runs:
            if self._process.poll() is not None or time.monotonic() - begun > self._seconds:
                text = self._log.read_text()[-LOG_CHARACTERS:]
                raise RuntimeError(f"SGLang's client ended or took over {self._seconds:.0f} s:\n{text}")
            time.sleep(POLL_SECONDS)


@contextmanager
def started(log: Path, seconds: float) -> Iterator[Client]:
    """A client that imports what it needs while a server starts."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        command = [sys.executable, "-u", "-m", "benchmarks.client"]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=output, stderr=subprocess.STDOUT)
    try:
        yield Client(process, log, seconds)
    finally:
        process.kill()
        process.wait()


def main() -> None:
    """Run SGLang's client with each line of standard input."""
    from sglang.benchmark import serving

    for line in sys.stdin:
        sys.argv = ["sglang.benchmark.serving", *json.loads(line)]
        serving.cli_main()
        print(OVER, flush=True)


if __name__ == "__main__":
    main()
