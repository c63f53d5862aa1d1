"""After the warm-up no pass compiles a kernel."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from nvfp4_sgl.cutedsl_kernels import launcher
from nvfp4_sgl.model.contract import PassKind, Slots
from nvfp4_sgl.model.tokens import ALIGNMENT, tokens_of
from nvfp4_sgl.ops.modes import ActivationMode
from nvfp4_sgl.standalone import Standalone
from nvfp4_sgl.synthetic.tiny import write_tiny
from nvfp4_sgl.targets.fused.warm_up import MAX_SHORT_PROMPT, divided_sizes, sizes, warm_up_passes
from nvfp4_sgl.triton_kernels.attention.tiling import MIN_TOGETHER
from nvfp4_sgl.weights.parallel import SEQUENCE_PARALLEL_TOKENS, TensorParallel, lone_rank
from tests.support import native
from tests.support.interpreted import ON_GPU

CAPACITY = 2048


def test_sizes():
    assert sizes(1) == [1]
    assert sizes(6) == [1, 2, 3, 4, 5, 6]
    assert sizes(100) == [1, 2, 3, 4, 5, 8, 9, 16, 17, 32, 33, 64, 65, 96, 100]


def test_sizes_of_each_kind():
    """On either side of a threshold anywhere, a multiple of 16 and another, as long as there is one."""
    assert [size for size in sizes(256, lambda size: size < 190) if size > 128] == [129, 176, 189, 255, 256]


@pytest.mark.parametrize("limit", [3000, 8190, 8192])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_divided_sizes(ranks: int, limit: int):
    """The last rank keeps each of the sizes of its largest part, of passes that there can be."""
    last = lone_rank(ranks)
    found = divided_sizes(limit, last)
    assert found and all(SEQUENCE_PARALLEL_TOKENS <= size <= limit for size in found)
    parts = {len(range(size)[tokens_of(last, size).kept]) for size in found}
    most = limit // ranks
    expected = {part for part in sizes(most) if part * ranks >= SEQUENCE_PARALLEL_TOKENS}
    assert parts <= expected
    assert expected - parts <= {part for part in expected if part % ALIGNMENT and part + ALIGNMENT > most}
    assert not divided_sizes(limit, TensorParallel()) and not divided_sizes(SEQUENCE_PARALLEL_TOKENS - 1, last)


@pytest.mark.parametrize(("tokens", "requests"), [(512, 4096), (4096, 4096), (512, 64)])
def test_decode_of_more_requests_than_a_chunk_has_tokens(tokens: int, requests: int):
    """Ranks divide such passes, too: the warm-up has each of their sizes."""
    slots = Slots(torch.zeros(1, 1024, dtype=torch.int32), torch.zeros(1, dtype=torch.int32), requests, longest=1024)
    passes = list(warm_up_passes(slots, tokens, lone_rank(2)))
    found = {len(one.positions) for one in passes if one.kind is PassKind.DECODE}
    assert max(found) == requests
    assert {size for size in divided_sizes(requests, lone_rank(2)) if size > tokens} <= found


def test_the_largest_short_prompt_shares_programs():
    assert MIN_TOGETHER <= MAX_SHORT_PROMPT


@triton.jit
def _zero(out):
    tl.store(out, 0)


@pytest.fixture
def compiled() -> Iterator[list[str]]:
    """Names of kernels as they are compiled, or loaded from Triton's cache on disk."""
    names: list[str] = []

    def hook(*args: Any, **kwargs: Any) -> None:
        names.append(str(kwargs.get("repr") or args))

    before = triton.knobs.runtime.jit_cache_hook
    triton.knobs.runtime.jit_cache_hook = hook
    yield names
    triton.knobs.runtime.jit_cache_hook = before


@pytest.fixture
def own_launcher() -> Iterator[None]:
    """The warm-up freezes the launcher of SM100's GEMMs; tests that come later compile further ones."""
    with launcher.use(launcher.CudaLauncher()):
        yield


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["nvfp4-full", "nvfp4-experts", "bf16"])
@pytest.mark.parametrize("run", native.runs(), ids=str)
def test_nothing_compiles_afterwards(
    run: native.Run, name: str, tmp_path: Any, compiled: list[str], own_launcher: None
):
    """Nor does the launcher, which is frozen by then, meet a GEMM that it would have to compile."""
    assert ON_GPU
    if name == "bf16" and run.mode is not ActivationMode.W4A16:
        pytest.skip("the mode takes no bf16 experts")
    write_tiny(tmp_path, name, seed=11)
    model = Standalone(tmp_path, target=run.target, mode=run.mode, device="cuda", requests=12, capacity=CAPACITY)
    slots = torch.zeros(2, CAPACITY, dtype=torch.int32, device="cuda")
    context = model.decoder.context
    known = Slots(slots, model.caches.full_to_swa.cuda(), requests=12, longest=CAPACITY)
    context.boundaries.plan(context, known, model.caches.layers).warm_up(model.decoder, model.table, CAPACITY)
    compiled.clear()
    _zero.device_caches.clear()  # the model's kernels may be those of another test, and loaded
    _zero[(1,)](slots)
    assert compiled, "the hook sees nothing"
    compiled.clear()
    generator = torch.Generator().manual_seed(0)

    def tokens(count: int) -> list[int]:
        return torch.randint(2, 500, (count,), generator=generator).tolist()

    for count in (7, 100, 431, 1200):
        model.reset()
        model.extend({0: tokens(count)})
        model.extend({0: tokens(3), 5: tokens(129), 7: tokens(1)})
        model.extend({request: tokens(1) for request in (0, 5, 7)})
        model.extend({request: tokens(1) for request in range(12)})
    assert not compiled
