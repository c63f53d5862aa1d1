"""Full-size models compile nothing once they serve: whatever passes come, the warm-up has launched their kernels.

Models are built with tensors that have no storage and launches are noted instead of made, so that contexts, chunks and
numbers of requests are those of real servers.
"""

from __future__ import annotations

import functools
import json
import math
import random
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from nvfp4_sgl import build, pushed_sums
from nvfp4_sgl.build import META, Serving
from nvfp4_sgl.cache.local import LocalCaches
from nvfp4_sgl.checkpoint.verified import Verified
from nvfp4_sgl.cutedsl_kernels import launcher
from nvfp4_sgl.cutedsl_kernels.sm90.shape import KernelShape
from nvfp4_sgl.memory.pools import table_margin
from nvfp4_sgl.model.contract import Context, PassKind, PassRequest, Slots
from nvfp4_sgl.model.decoder import Decoder
from nvfp4_sgl.synthetic.dummy import DummyReader
from nvfp4_sgl.synthetic.random_weights import verify_dummy
from nvfp4_sgl.synthetic.tiny_config import BASE, TinyFormat, tiny_config
from nvfp4_sgl.targets.choose import choose, mode_of
from nvfp4_sgl.targets.fused.gemm_planner import DryLauncher, GemmPlanner
from nvfp4_sgl.targets.target import descriptor
from nvfp4_sgl.triton_kernels import ahead
from nvfp4_sgl.triton_kernels.ahead import Variant
from tests.support.released import FLASH, PRO, config_json

MODELS = {"flash": FLASH, "pro": PRO}
PASSES = 40
"""Random passes of each server."""
MOST_PROMPTS = 40
"""Most prompts of a pass."""


@functools.cache
def verified(model: str) -> Verified:
    fields = config_json(MODELS[model])
    known = {name: value for name, value in fields.items() if name in BASE or name == "compress_ratios"}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(tiny_config(TinyFormat.NVFP4_FULL, known)))
        return verify_dummy(folder)


class DryServer:
    """A server's decoder and planner after the warm-up; ``warm`` is what that launched.

    Args:
        dtype: torch's default while weights are loaded.
    """

    def __init__(self, checkpoint: Verified, target: str, setting: Serving, dtype: torch.dtype = torch.float32) -> None:
        self.gpu, self.setting = descriptor(target).gpu(), setting
        self._launcher = DryLauncher(target, self.gpu.clusters)
        mode = setting.mode or mode_of(target, checkpoint.raw.get("activation_mode"))
        choice, config = choose(target, mode), build.with_distinct_layers(checkpoint)
        with launcher.use(self._launcher), ahead.targeting(self.gpu.capability, self.gpu.processors), torch.no_grad():
            context = Context(
                DummyReader(checkpoint.inventory, META), config, choice.boundaries, META, torch.bfloat16, choice.mode,
                build.share_of(setting, config.hidden_size, target), setting.uniform_experts,
            )  # fmt: skip
            before = torch.get_default_dtype()
            torch.set_default_dtype(dtype)
            try:
                self.decoder = Decoder(context)
            finally:
                torch.set_default_dtype(before)
            caches = LocalCaches(config, packed=True, dtype=torch.bfloat16, device=META)
            columns = setting.context + table_margin(0)
            table = torch.empty(setting.requests + 1, columns, dtype=torch.int32, device=META)
            slots = Slots(table, caches.full_to_swa.to(META), setting.requests, setting.context)
            planner = choice.boundaries.plan(context, slots, caches.layers)
            assert isinstance(planner, GemmPlanner)
            self.planner = planner
            self.embedding = torch.empty(config.vocab_size, config.hidden_size, dtype=torch.bfloat16, device=META)
            self.warm = set(planner.triton_variants(self.decoder, self.embedding, setting.chunk))

    @torch.no_grad()
    def missed(self, added: list[int], longest: int, *, decode: bool = False) -> set[Variant]:
        """What a pass launches that the warm-up did not."""
        requests = len(added)
        with (
            launcher.use(self._launcher),
            ahead.targeting(self.gpu.capability, self.gpu.processors),
            ahead.recording() as found,
        ):
            positions, rows, ends = (
                torch.empty(n, dtype=torch.int64, device=META) for n in (sum(added), requests, requests)
            )
            new_tokens = None if decode else torch.empty(requests, dtype=torch.int32, device=META)
            kind = PassKind.DECODE if decode else PassKind.EXTEND
            step = self.planner.plan(PassRequest(positions, rows, ends, kind, new_tokens, longest=longest))
            ids, layers = torch.zeros_like(positions), self.decoder.distinct_layers()
            self.decoder(self.decoder.embed(ids, self.embedding), ids, step, self.planner.caches, only=layers)
        return set(found) - self.warm


def passes(setting: Serving, count: int) -> Iterator[tuple[list[int], int, bool]]:
    """Random ones, sizes by their order of magnitude: tokens that each request adds, the longest, whether decode."""
    chance = random.Random(0)
    most = min(setting.chunk, setting.context)
    for _ in range(count):
        kind = chance.random()
        if kind < 0.25:
            added = [1] * chance.randint(1, setting.requests)
        elif kind < 0.6:
            added = [int(2 ** chance.uniform(0, math.log2(most)))]
        else:
            requests = chance.randint(2, min(setting.requests, MOST_PROMPTS))
            total = max(int(2 ** chance.uniform(math.log2(requests), math.log2(setting.chunk))), requests + 1)
            cuts = sorted(chance.sample(range(1, total), requests - 1))
            added = [end - begin for begin, end in zip([0, *cuts], [*cuts, total], strict=True)]
            added = [min(tokens, setting.context) for tokens in added]
        longest = max(
            int(setting.context / 2 ** chance.uniform(0, math.log2(setting.context / max(added)))), max(added)
        )
        yield added, longest, max(added) == 1 and chance.random() < 0.8


SERVERS = {
    # The default context of --context-length is the model's; these lengths choose other tiles and parts of a prompt.
    "flash, a long context": ("flash", "sm_90a", Serving(1, 131072, 16, 8192)),
    "flash, two ranks": ("flash", "sm_90a", Serving(2, 262144, 64, 8192)),
    "flash, a million tokens": ("flash", "sm_90a", Serving(4, 1048576, 16, 4096)),
    "flash, contexts shorter than a chunk": ("flash", "sm_90a", Serving(1, 1024, 48, 8192)),
    "flash, a context that is no power of two": ("flash", "sm_90a", Serving(2, 3000, 48, 8192)),
    "flash on SM100": ("flash", "sm_100a", Serving(4, 131072, 64, 8192)),
    "pro on SM100": ("pro", "sm_100a", Serving(8, 131072, 64, 8192)),
}
FOUND: dict[str, list[tuple[list[int], int]]] = {
    "flash, a long context": [([7841], 44127), ([8192], 100000), ([3002], 94000)],
    "flash, two ranks": [([40], 310), ([24], 3000), ([60], 1500), ([40], 6000)],
    "flash, a million tokens": [([502], 1025119)],
    "flash, contexts shorter than a chunk": [([1000, 1000, 1000], 1024), ([1024] * 8, 1024)],
    "flash on SM100": [([40], 765)],
    "pro on SM100": [([41], 330), ([2549], 61740)],
}
"""Passes whose kernels the warm-up once lacked: tokens of each request, and the longest."""


@pytest.mark.parametrize("name", SERVERS)
def test_nothing_is_compiled_once_a_server_is_warm(name: str) -> None:
    model, target, setting = SERVERS[name]
    server = DryServer(verified(model), target, setting)
    assert server.warm
    for added, longest in FOUND.get(name, []):
        assert not (missed := server.missed(added, longest)), (added, longest, [variant.name for variant in missed])
    serve(server)


def serve(server: DryServer) -> None:
    """Random passes, none of which launches what the warm-up did not."""
    for added, longest, decode in passes(server.setting, PASSES):
        missed = server.missed(added, longest, decode=decode)
        words = [f"{variant.name}: {variant.specialization}" for variant in missed][:2]
        assert not missed, (len(added), sum(added), longest, decode, words)


VARIANT_LIMITS = {
    "_route_topk": 9,
    "_route_hash": 9,
    "_split": 6,
    "_place": 5,
    "_scan": 4,
    "_resolve": 3,
    "_cos_sin_kernel": 2,
    "_copy_to_streams": 2,
}
"""Limits of compiled variants, by kernel, in a server of 64 requests."""


@pytest.mark.parametrize(("target", "inputs"), [("sm_90a", 30), ("sm_100a", 53)])
def test_sizes_of_passes_compile_few_variants(target: str, inputs: int) -> None:
    """Triton must not specialise on the divisibility by 16 of numbers of tokens, requests, pairs and padded rows.

    inputs: variants of ``_attention_inputs`` at most. Those of SM100 are also compiled for the GEMMs' token tile.
    """
    found = Counter(variant.name for variant in DryServer(verified("flash"), target, Serving(1, 131072, 64, 8192)).warm)
    limits = {"_attention_inputs": inputs, **VARIANT_LIMITS}
    assert found.keys() >= limits.keys()
    more = {name: found[name] for name, most in limits.items() if found[name] > most}
    assert not more, more


@pytest.mark.parametrize(("ranks", "tiles"), [(2, {8, 16, 32}), (4, {8, 16})])
def test_nothing_is_compiled_once_a_server_that_pushes_sums_is_warm(
    ranks: int, tiles: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Passes of up to 32 tokens push, with GEMMs of ``tiles``; others do not; both come."""
    setting = Serving(ranks, 4096, 64, 8192)
    monkeypatch.setenv(pushed_sums.SWITCH, "0")
    reducing = DryServer(verified("flash"), "sm_90a", setting)
    monkeypatch.setenv(pushed_sums.SWITCH, "1")
    pushing = DryServer(verified("flash"), "sm_90a", setting)
    serve(pushing)
    with launcher.use(DryLauncher("sm_90a", pushing.gpu.clusters)):
        shapes = [key.shape for key in pushing.planner.gemms(setting.chunk) if isinstance(key.shape, KernelShape)]
    assert {shape.copies for shape in shapes} == {0, ranks - 1}
    assert {shape.token_tile for shape in shapes if shape.copies} == tiles
    both, more = reducing.warm & pushing.warm, pushing.warm - reducing.warm
    assert {variant.name for variant in more} == {"site_kernel", "_finalize"} <= {variant.name for variant in both}


def test_uniform_routing_is_the_same_whatever_the_default_dtype() -> None:
    """SGLang loads dummy weights with the model's, ``nvfp4-sgl build`` with torch's."""
    checkpoint, setting = verified("flash"), Serving(2, 4096, 4, 1024, True)
    built, served = (DryServer(checkpoint, "sm_90a", setting, dtype).warm for dtype in (torch.float32, torch.bfloat16))
    assert built == served
