"""Sampling on a GPU: every kind draws from what it leaves, and nothing is compiled once the server is ready.

What would be compiled shows in three places: SGLang logs each Triton program that is loaded after it began to serve,
``torch.compile`` and what nvcc compiles leave files in their caches.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nvfp4_sgl.config import read_config_json
from tests.support import native
from tests.support.bf16_logprobs import prompt
from tests.support.gpu_server import FLAGS, SHAPES
from tests.support.sampling import ask, require_bias, require_kinds, require_penalties
from tests.support.server import Server, ServerPool

pytestmark = [pytest.mark.gpu, pytest.mark.server, pytest.mark.timeout(900)]

IDS = prompt(40, seed=8)
NEAR = 0.5
"""How far a log-probability may be off between a decode step and a prompt, where a choice of experts or entries flips
(0.24 at 90 % of positions: ``test_decoder``). Every penalty is larger."""
LATE = re.compile(r"Triton kernel '(.*?)' (?:device-loaded|took .* to compile) after serving started")
"""What SGLang logs; the variables of :data:`WATCH` have it do so at every one."""
WATCH = {"SGLANG_TRITON_LOAD_WARNING_THRESHOLD_GB": "1e9", "SGLANG_TRITON_SLOW_COMPILE_THRESHOLD_SECS": "0"}
CACHES = (".cache/flashinfer", ".cache/tvm-ffi", ".cache/sglang", ".cache/torch_extensions")
"""Folders of the home directory in which programs compiled by nvcc are kept."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its configuration has no torch_dtype, from which SGLang would conclude float16."""
    (target,) = native.targets()
    path = native.write_checkpoint(target, tmp_path_factory.mktemp("tiny"), seed=3, **SHAPES)
    fields = read_config_json(path)
    del fields["torch_dtype"]
    (path / "config.json").write_text(json.dumps(fields))
    return path


@pytest.fixture(scope="module")
def inductor(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty folder for what ``torch.compile`` compiles."""
    return tmp_path_factory.mktemp("inductor")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, checkpoint: Path, inductor: Path) -> Iterator[Server]:
    pool = ServerPool(tmp_path_factory.mktemp("servers"))
    yield pool(checkpoint, *FLAGS, environment={**WATCH, "TORCHINDUCTOR_CACHE_DIR": str(inductor)})
    pool.close()


@pytest.fixture(scope="module")
def vocabulary(checkpoint: Path) -> int:
    return int(read_config_json(checkpoint)["vocab_size"])


def compiled(inductor: Path) -> set[str]:
    """Files of the caches of ``torch.compile`` and nvcc."""
    folders = [inductor, *(Path.home() / name for name in CACHES)]
    return {str(file) for folder in folders for file in folder.rglob("*") if file.is_file()}


def test_nothing_is_compiled_for_a_request(server: Server, inductor: Path) -> None:
    """Requests of every kind, in batches of sizes that the warm-up does not have."""
    files, logged = compiled(inductor), len(server.text())
    common = {"temperature": 0.8, "max_new_tokens": 4, "ignore_eos": True}
    kinds: list[dict[str, Any]] = [
        {"temperature": 0},
        {"top_p": 0.5},
        {"top_k": 3},
        {"min_p": 0.2},
        {"top_p": 0.9, "top_k": 20, "min_p": 0.1},
        {"repetition_penalty": 1.2},
        {"frequency_penalty": 0.3, "presence_penalty": 0.2},
        {"min_new_tokens": 2, "ignore_eos": False},
        {"logit_bias": {"97": 5}},
        {"regex": "[a-z]+"},
    ]
    for kind in kinds:
        for rows in (1, 3, 8, 16):
            ask(server, [IDS] * rows, [common | kind] * rows, top_logprobs_num=3)
    for rows in (7, 13):
        mixed = [common | kinds[row % len(kinds)] for row in range(rows)]
        ask(server, [prompt(20 + row, seed=row) for row in range(rows)], mixed)
    late = sorted(set(LATE.findall(server.text()[logged:])))
    assert (late, sorted(compiled(inductor) - files)) == ([], [])


def test_defaults(server: Server) -> None:
    info = server.get("/server_info")
    assert (info["sampling_backend"], info["dtype"]) == ("pytorch", "bfloat16")


def test_every_kind_draws_from_what_it_leaves(server: Server, vocabulary: int) -> None:
    require_kinds(server, IDS, vocabulary)


def test_penalties(server: Server, vocabulary: int) -> None:
    require_penalties(server, IDS, vocabulary, near=NEAR)


def test_a_bias(server: Server) -> None:
    require_bias(server, IDS)
