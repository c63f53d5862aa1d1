"""Servers of several ranks beside one rank, all of the same random weights, which no file holds.

So a model may be as wide as a release. No reference computes its log-probabilities: that ranks agree is judged by how
much farther from one rank a server is of which one rank's share of the experts of a layer is lost.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.bf16_logprobs import prompt
from tests.support.pair import FAULTS
from tests.support.scored import Scored, differences
from tests.support.server import Server

PROMPTS = [prompt(length, seed=50) for length in (5, 129, 700)]
"""Ids of each prompt; the longest closes windows of both ratios many times."""
CONTRAST = 8
"""A lost share moves the median at least so many times as far as another number of ranks."""
MOST = 0.3
"""Bound of the median difference of log-probabilities. Roundings of bf16 alone move small models of four layers by 0.1
(``tests/gpu/test_pro_width.py``, interpreted)."""


@dataclass(frozen=True)
class Place:
    """Where servers run.

    Attributes:
        flags: of all servers. ranks: of those that have several. one: environment of the server of one rank.
    """

    flags: tuple[str, ...]
    ranks: int
    one: Mapping[str, str] = field(default_factory=dict)


def write_config(folder: Path, fields: Mapping[str, Any]) -> Path:
    """A folder that holds config.json alone."""
    (folder / "config.json").write_text(json.dumps(dict(fields)))
    return folder


@contextmanager
def servers(place: Place, model: Path, folder: Path) -> Iterator[dict[str, Server]]:
    """``one`` rank, ``several``, and several of which one is ``broken``; they start together."""
    flags = (*place.flags, "--load-format", "dummy", "--skip-tokenizer-init")
    split = ("--tp-size", str(place.ranks))
    fault = {"PYTHONPATH": str(FAULTS), "PLANTED_FAULT": "share"}
    with ExitStack() as stack:
        found = {}
        for name, more, environment in (
            ("one", (), place.one),
            ("several", split, {}),
            ("broken", (*split, "--disable-cuda-graph"), fault),
        ):
            server = Server.launch(model, *flags, *more, log=folder / f"{name}.log", environment=environment)
            found[name] = stack.enter_context(server)
        yield {name: server.wait_ready() for name, server in found.items()}


def check(found: Mapping[str, Server]) -> None:
    """Several ranks agree with one; a lost share is seen."""
    scored = {name: [Scored.ask(server, ids) for ids in PROMPTS] for name, server in found.items()}
    agreed, lost = (float(differences(scored[name], scored["one"]).median()) for name in ("several", "broken"))
    print(f"median differences from one rank: several {agreed:.2g}, with a lost share {lost:.2g}")
    assert agreed <= MOST
    assert lost >= CONTRAST * agreed and lost > 1e-3
