"""The model served by SGLang on this GPU: its own pools, decode CUDA graphs, radix cache, chunked prefill.

Log-probabilities are judged as in ``test_decoder``: against the CPU reference in the same mode, by what rounding to
bf16, and in ``w4a4`` to NVFP4, costs that reference.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from nvfp4_sgl.targets.choose import choose
from tests.support import bf16_logprobs, native
from tests.support.bf16_logprobs import TOKENS, References, errors, generate, prompt
from tests.support.gpu_server import FLAGS, SHAPES, outputs, require_as_good
from tests.support.server import ServerPool

pytestmark = [pytest.mark.gpu, pytest.mark.server, pytest.mark.timeout(900)]

LENGTHS = (1, 5, 127, 128, 129, 700, 2500)


@pytest.fixture(scope="module")
def target() -> str:
    """This GPU's, which the server finds by itself."""
    (found,) = native.targets()
    return found


@pytest.fixture(scope="module")
def checkpoint(target: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return native.write_checkpoint(target, tmp_path_factory.mktemp("tiny"), seed=3, **SHAPES)


@pytest.fixture(scope="module")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Any:
    pool = ServerPool(tmp_path_factory.mktemp("servers"))
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def references(target: str, checkpoint: Path) -> Iterator[References]:
    with bf16_logprobs.references(checkpoint, capacity=3072, mode=native.MODES[target]) as computed:
        yield computed


def test_cold_chunked_and_concurrent(target: str, serve: ServerPool, checkpoint: Path, references: Any):
    """2500 tokens are three chunks; all requests at once decode in padded graphs."""
    server = serve(checkpoint, *FLAGS)
    cold, crowd = ([prompt(n, seed=seed) for n in LENGTHS] for seed in (0, 2))
    alone = [generate(server, ids, logprob_start_len=0) for ids in cold]
    with ThreadPoolExecutor(len(LENGTHS)) as threads:
        together = list(threads.map(lambda ids: generate(server, ids), crowd))
    require_as_good(native.MODES[target], *errors(alone, cold, references))
    require_as_good(native.MODES[target], *errors(together, crowd, references))


def test_prefix_cache(target: str, serve: ServerPool, checkpoint: Path, references: Any):
    server = serve(checkpoint, *FLAGS)
    answers, prompts = [], []
    for shared, length in ((768, 900), (512, 600), (256, 400)):
        first = prompt(shared + 9, seed=5)
        generate(server, first)
        again = first[:shared] + prompt(length - shared, seed=6)
        answer = generate(server, again, 140 if shared == 512 else TOKENS)
        assert answer["meta_info"]["cached_tokens"] == shared
        answers.append(answer)
        prompts.append(again)
    require_as_good(native.MODES[target], *errors(answers, prompts, references))


def test_the_server_says_what_runs(target: str, serve: ServerPool, checkpoint: Path):
    server = serve(checkpoint, *FLAGS)
    info, chosen = server.info(), choose(target)
    assert (info["target"], info["activation_mode"]) == (target, native.MODES[target].value)
    assert info["boundaries"] == chosen.boundaries.names() and info["note"] == chosen.note
    assert info["attention_backend"].endswith("Nvfp4AttentionBackend") and "584-byte" in info["kv_rows"]
    assert f"NOTE: {chosen.note}" in server.text()


def test_graphs_and_eager_decode_give_the_same_bits(serve: ServerPool, checkpoint: Path):
    """Both servers run prompts eagerly; ``test_prompt_graphs`` has those in graphs."""
    captured = serve(checkpoint, *FLAGS, environment={"NVFP4_SGL_PROMPT_GRAPHS": "0"})
    with_graphs = outputs(captured)
    assert "cuda graph: True" in captured.text()
    assert outputs(serve(checkpoint, *FLAGS, "--disable-cuda-graph")) == with_graphs
