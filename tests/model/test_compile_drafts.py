"""Kernels of runs that draft are compiled ahead: those of passes that verify, and those of the draft itself."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from nvfp4_sgl import cli
from nvfp4_sgl.build import Serving, needed_by_draft
from nvfp4_sgl.cache.layout import DRAFTED_STATE_RING, STATE_RING, Rings
from nvfp4_sgl.cache.local import LocalCaches
from nvfp4_sgl.checkpoint.drafts import DraftKind
from nvfp4_sgl.checkpoint.reader import CheckpointReader
from nvfp4_sgl.checkpoint.verified import Verified, verify
from nvfp4_sgl.config import LayerKind
from nvfp4_sgl.cutedsl_kernels import launcher
from nvfp4_sgl.cutedsl_kernels.compiled import KernelCache, KernelKey
from nvfp4_sgl.cutedsl_kernels.errors import LibraryError
from nvfp4_sgl.cutedsl_kernels.sm90.shape import KernelShape
from nvfp4_sgl.draft_config import DsparkConfig
from nvfp4_sgl.memory.pools import table_margin
from nvfp4_sgl.model.contract import Context, PassKind, PassRequest, Slots
from nvfp4_sgl.model.dspark import DsparkDraft
from nvfp4_sgl.model.mtp import MtpDraft
from nvfp4_sgl.serving.drafts import checks
from nvfp4_sgl.synthetic.random_weights import verify_dummy
from nvfp4_sgl.synthetic.tiny import write_tiny
from nvfp4_sgl.targets.fused import compile_ahead
from nvfp4_sgl.targets.fused.attention import HCA_ENTRIES
from nvfp4_sgl.targets.fused.warm_up import sizes_of_several, warm_up_passes
from nvfp4_sgl.targets.target import descriptor
from nvfp4_sgl.triton_kernels import ahead
from nvfp4_sgl.triton_kernels.attention import tiling
from nvfp4_sgl.triton_kernels.attention.tiling import choose_splits, choose_tiling
from nvfp4_sgl.weights.parallel import TensorParallel
from tests.model.test_compile_ahead import CAPACITY, REQUESTS, OnTheCpu
from tests.support.noting_launcher import NotingLauncher

EACH = 4
"""Rows of a request in a pass that verifies."""
LENGTHS = (1, 4, 130, 511)
CHUNK = 9
"""Tokens of the largest prefill pass: fewer than passes that verify have."""
TARGETS = ("sm_90a", "sm_100a")


@pytest.fixture(scope="module", params=["mtp", "dspark"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("tiny")
    write_tiny(path, "nvfp4-experts", seed=3, num_hidden_layers=3, draft=request.param)
    return path


def slots_of(
    swa: torch.Tensor, drafted: int = EACH, rings: Rings = DRAFTED_STATE_RING, longest: int = CAPACITY
) -> Slots:
    table = torch.zeros(REQUESTS + 1, longest + table_margin(drafted), dtype=torch.int32)
    return Slots(table, swa, REQUESTS, longest, rings, drafted)


def passes(each: int, kind: PassKind) -> Sequence[PassRequest]:
    """Of any number of requests, behind sequences of some lengths."""
    found = []
    for requests in range(1, REQUESTS + 1):
        for length in LENGTHS:
            positions = torch.arange(length, length + each).repeat(requests)
            ends = torch.full((requests,), length + each)
            found.append(PassRequest(positions, torch.zeros_like(ends), ends, kind, tokens_each=each))
    return found


@pytest.mark.parametrize("checkpoint", ["mtp"], indirect=True)
@pytest.mark.parametrize("target", TARGETS)
def test_passes_that_verify(checkpoint: Path, target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They have more tokens than any prompt's pass, and launch nothing that was not warmed up.

    On Hopper the queries of a request share programs of attention from 9 on, here.
    """
    monkeypatch.setattr(tiling, "MIN_TOGETHER", 9)
    cpu = OnTheCpu(checkpoint, target)
    model, context = cpu.model, cpu.model.decoder.context
    planner: Any = context.boundaries.plan(context, slots_of(model.caches.full_to_swa), model.caches.layers)
    warm = cpu.variants(lambda: planner.warm_up(model.decoder, model.table, CHUNK))

    def work() -> None:
        for request in passes(EACH, PassKind.VERIFY):
            ids = torch.zeros_like(request.positions)
            model.decoder(model.decoder.embed(ids, model.table), ids, planner.plan(request), model.caches.layers)

    cpu.launcher.gemms.clear()
    found = cpu.variants(work)
    missed = found - warm
    assert not missed, [f"{variant.name}: {variant.specialization}" for variant in missed][:3]
    names = {variant.name for variant in found if variant.name.startswith("attend")}
    assert names == ({"attend", "attend_block"} if target == "sm_90a" else {"attend"})
    with launcher.use(cpu.launcher):
        assert cpu.launcher.gemms and cpu.launcher.gemms <= set(planner.gemms(CHUNK))


@pytest.mark.parametrize("least", [tiling.MIN_TOGETHER, 100])
@pytest.mark.parametrize("each", [2, 4, 6, 16])
def test_every_tiling_of_attention_is_warmed_up(each: int, least: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On Hopper, of up to 200 requests, wherever queries of a request begin to share programs."""
    monkeypatch.setattr(tiling, "MIN_TOGETHER", least)
    layers = [(heads, (128, extra)) for heads in (8, 16, 32, 64) for extra in (0, 512, 8192)]

    def needed(sizes: Iterable[int]) -> set[Hashable]:
        """Layers, and what attention of theirs is compiled for."""
        found: set[Hashable] = set()
        for (heads, columns), size in product(layers, sizes):
            tokens, sharing = size * each, {"each": each, "expected": HCA_ENTRIES}
            chosen = choose_tiling(tokens, heads, columns, 132, packed=True, together=True, **sharing)
            splits = 1 if chosen.queries > 1 else choose_splits(tokens, heads, columns, 132, chosen)
            found.add((heads, columns, chosen, splits > 1))
        return found

    with ahead.targeting(90, 132):
        assert needed(sizes_of_several(200, each, lambda tokens: None)) == needed(range(1, 201))


class Drafting:
    """A draft on a GPU target whose launches are noted, on real tensors; a block is a token shorter than a pass."""

    def __init__(self, verified: Verified, target: str, longest: int = CAPACITY):
        self.launcher = NotingLauncher(target, descriptor(target).gpu().clusters)
        self._gpu, read = descriptor(target).gpu(), CheckpointReader.read
        # Aligned, as on a GPU: what is read lies in the file as it comes.
        with mock.patch.object(CheckpointReader, "read", lambda *given, **more: read(*given, **more).clone()):
            reader = verified.draft_reader()
            context = Context(reader, verified.config, descriptor(target).boundaries(), dtype=torch.bfloat16)
            self.fields: DsparkConfig | None = None
            bundled = verified.draft()
            assert bundled is not None
            self.draft: MtpDraft | DsparkDraft
            if bundled.kind is DraftKind.MTP:
                self.draft, blocks = MtpDraft(context), 1
            else:
                self.fields = replace(DsparkConfig.parse(verified.raw, verified.config), block=EACH - 1)
                self.draft, blocks = DsparkDraft(context, self.fields), self.fields.stages
        config = replace(verified.config, num_hidden_layers=blocks, layer_kinds=(LayerKind.SWA,) * blocks)
        caches = LocalCaches(config, packed=True, dtype=torch.bfloat16)
        context = replace(self.draft.context, config=config)
        slots = slots_of(caches.full_to_swa, longest=longest)
        self.planner: Any = context.boundaries.plan(context, slots, caches.layers)
        self.table = torch.zeros(config.vocab_size, config.hidden_size, dtype=torch.bfloat16)

    def variants(self, work: Callable[[], object]) -> set[ahead.Variant]:
        """What ``work`` launches."""
        targeting = ahead.targeting(self._gpu.capability, self._gpu.processors)
        with targeting, launcher.use(self.launcher), ahead.recording() as found:
            work()
        return set(found)

    def warm_up(self) -> set[ahead.Variant]:
        return self.variants(lambda: self.planner.warm_up(self.draft, self.table, CHUNK))


@pytest.mark.parametrize("target", TARGETS)
@torch.no_grad()
def test_passes_of_a_draft(checkpoint: Path, target: str) -> None:
    """They launch nothing that was not warmed up: GEMMs of the draft's own matrices, and Triton kernels."""
    drafting = Drafting(verify(checkpoint), target)
    warm, fields = drafting.warm_up(), drafting.fields
    drafting.launcher.gemms.clear()

    def work() -> None:
        last = (1, PassKind.DECODE) if fields is None else (fields.block, PassKind.BLOCK)
        for each, kind in ((EACH, PassKind.VERIFY), last):
            for request in passes(each, kind):
                step = drafting.planner.plan(request)
                drafting.planner.draft(drafting.draft, drafting.table[: len(request.positions)], step)

    found = drafting.variants(work)
    missed = found - warm
    assert found and not missed, [f"{variant.name}: {variant.specialization}" for variant in missed][:3]
    with launcher.use(drafting.launcher):
        assert drafting.launcher.gemms and drafting.launcher.gemms <= set(drafting.planner.gemms(CHUNK))
    stems = {shard.stem for gemm in drafting.planner.gemm_specs() for shard in gemm.shards}
    assert all(stem.startswith("mtp.") for stem in stems)
    assert stems >= ({"mtp.0.main_proj"} if fields else {"mtp.0.e_proj", "mtp.0.h_proj"})


FLAGS = {
    "mtp": ("--speculative-algorithm", "EAGLE", "--speculative-num-steps", str(EACH - 1)),
    "dspark": ("--speculative-algorithm", "dspark", "--speculative-dspark-block-size", str(EACH - 1)),
}
LONGEST = 1020
"""Tokens of a context. A row of slots is a multiple of 16 columns where nothing is drafted, and is none here."""


@pytest.mark.parametrize(("checkpoint", "target"), [("mtp", "sm_90a"), ("dspark", "sm_100a")], indirect=["checkpoint"])
def test_build_makes_what_a_drafted_server_asks_for(
    checkpoint: Path, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GEMMs in a library for the target and one for the draft, by whose kernels they are found, and Triton kernels."""
    monkeypatch.setattr(checks, "check_draft", lambda *given: None)  # kernels of targets that draft nothing yet, too
    made: dict[Path, set[KernelKey]] = {}
    variants: set[ahead.Variant] = set()

    def note(keys: Sequence[KernelKey], several: Sequence[ahead.Variant], folder: Path, capability: int) -> None:
        made[folder] = set(keys)
        variants.update(several)

    monkeypatch.setattr(compile_ahead, "compile_missing", note)
    asked: dict[Path, set[KernelKey]] = {}
    cpu, drafting = OnTheCpu(checkpoint, target), Drafting(verify(checkpoint), target, LONGEST)
    context, caches = cpu.model.decoder.context, cpu.model.caches
    slots = slots_of(caches.full_to_swa, longest=LONGEST)
    planner: Any = context.boundaries.plan(context, slots, caches.layers)
    warm = cpu.variants(lambda: planner.warm_up(cpu.model.decoder, cpu.model.table, CHUNK)) | drafting.warm_up()
    for each in (planner, drafting.planner):
        with launcher.use(drafting.launcher):
            keys = each.gemms(CHUNK)
        asked[compile_ahead.library_folder(keys)] = set(keys)

    sizes = {"--context-length": LONGEST, "--max-running-requests": REQUESTS, "--chunked-prefill-size": CHUNK}
    flags = [str(word) for pair in sizes.items() for word in pair]
    kind = "mtp" if drafting.fields is None else "dspark"
    assert cli.main(["build", str(checkpoint), "--target", target, *flags, *FLAGS[kind]]) == 0
    assert made == asked and variants == warm


@pytest.mark.parametrize("checkpoint", ["mtp"], indirect=True)
def test_a_draft_of_random_weights(checkpoint: Path) -> None:
    """In the storages that config.json claims, though there is no tensor."""
    verified, target = verify_dummy(checkpoint), "sm_90a"
    drafting = Drafting(verified, target)
    setting = Serving(1, CAPACITY, REQUESTS, CHUNK, round_tokens=EACH)
    gemms, variants = needed_by_draft(verified, target, setting, descriptor(target).gpu())
    assert set(variants) == drafting.warm_up()
    with launcher.use(drafting.launcher):
        assert list(gemms) == list(drafting.planner.gemms(CHUNK))


def test_a_draft_of_ranks_that_push_stores_copies(tmp_path: Path) -> None:
    released, converted = tmp_path / "released", tmp_path / "converted"
    write_tiny(released, "deepseek", seed=3, num_hidden_layers=1, draft="mtp", moe_intermediate_size=128)
    assert cli.main(["convert", str(released), str(converted), "--drafts", "nvfp4"]) == 0
    verified, target = verify(converted), "sm_90a"
    for pushes in (True, False):
        setting = Serving(2, CAPACITY, REQUESTS, CHUNK, round_tokens=EACH, pushed_sums=pushes)
        gemms, _ = needed_by_draft(verified, target, setting, descriptor(target).gpu())
        assert ({key.shape.copies for key in gemms if isinstance(key.shape, KernelShape)} == {0, 1}) is pushes


REFUSED = {
    ("sm_90a", FLAGS["dspark"]): "--speculative-algorithm DSPARK: expected",
    ("sm_90a", FLAGS["mtp"][2:]): "--speculative-num-steps 3: expected --speculative-algorithm, too",
    ("sm_90a", (*FLAGS["mtp"], *FLAGS["dspark"][2:])): "--speculative-dspark-block-size 3: expected",
}


@pytest.mark.parametrize("checkpoint", ["mtp"], indirect=True)
def test_build_refuses_what_a_server_refuses(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for (target, flags), message in REFUSED.items():
        assert cli.main(["build", str(checkpoint), "--target", target, *flags]) == 2
        assert f"nvfp4-sgl: error: {message}" in capsys.readouterr().err


def test_a_run_without_drafts_compiles_nothing_for_them() -> None:
    """Rings and passes are what they were."""
    slots = replace(slots_of(torch.zeros(1, dtype=torch.int64)), drafted=1, rings=STATE_RING)
    kinds = {one.kind for one in warm_up_passes(slots, CAPACITY, TensorParallel())}
    assert kinds == {PassKind.EXTEND, PassKind.DECODE}
    drafted = [*warm_up_passes(replace(slots, drafted=EACH), CAPACITY, TensorParallel(), block=3)]
    for kind, each in ((PassKind.VERIFY, EACH), (PassKind.BLOCK, 3)):
        found = [one for one in drafted if one.kind is kind]
        assert {one.tokens_each for one in found} == {each}
        assert max(len(one.requests) for one in found) == REQUESTS


def test_a_draft_has_its_kernels_beside_those_of_its_target() -> None:
    """The target's are ready and nothing more may be compiled when the draft's library comes."""
    target, draft, other = (KernelKey("sm_90a", KernelShape(tile)) for tile in (8, 16, 32))

    class Holds:
        def __init__(self, key: KernelKey):
            self.key = key

        def kernel(self, key: KernelKey) -> Any:
            return key.name if key == self.key else None

    kernels = KernelCache(Holds(target))
    kernels.freeze()
    kernels.add(Holds(draft))
    kernels.freeze()
    assert [kernels.get(key) for key in (target, draft)] == [target.name, draft.name]
    with pytest.raises(LibraryError, match="compiling is switched off"):
        kernels.get(other)
