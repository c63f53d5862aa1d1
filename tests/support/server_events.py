"""What a server under test says of itself in its log: lines of JSON from its processes, read back by the test."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.support.reference_gemms import ReferenceLauncher

MARK = "server event: "


def tell(event: str, **facts: Any) -> None:
    """Write an event to this process's standard output, which is the server's log."""
    print(f"\n{MARK}{json.dumps({'event': event, **facts})}", flush=True)


def told(log: str, event: str) -> list[dict[str, Any]]:
    """Every event of that name in a log, in order."""
    lines = (json.loads(line.removeprefix(MARK)) for line in log.splitlines() if line.startswith(MARK))
    return [line for line in lines if line["event"] == event]


def told_once(log: str, event: str) -> dict[str, Any]:
    """The one event of that name."""
    found = told(log, event)
    assert len(found) == 1, f"expected one event '{event}' in the server's log, found {len(found)}"
    return found[0]


def tell_freeze(runner: ReferenceLauncher) -> None:
    """Have a launcher tell which GEMMs had run when it was frozen, as the event ``frozen``."""
    freeze = runner.freeze

    def freeze_and_tell() -> None:
        freeze()
        tell("frozen", gemms=sorted({key.name for key in runner.keys}))

    runner.freeze = freeze_and_tell  # type: ignore[method-assign]
