"""``nvfp4-sgl build``: compile every kernel that a server of a checkpoint needs, on any machine.

The checkpoint's model is built with tensors that have sizes and no storage, and its warm-up is followed without a
launch (:mod:`nvfp4_sgl.targets.fused.compile_ahead`). So neither a GPU nor memory for weights is needed, and
config.json is enough. The machine that serves needs the same Triton, CuTeDSL and version of this package.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from nvfp4_sgl import pushed_sums
from nvfp4_sgl.cache.layout import DRAFTED_STATE_RING, STATE_RING, Rings
from nvfp4_sgl.cache.local import LocalCaches
from nvfp4_sgl.checkpoint.drafts import DraftKind
from nvfp4_sgl.checkpoint.inventory import Inventory
from nvfp4_sgl.checkpoint.verified import Verified
from nvfp4_sgl.config import LayerKind, ModelConfig
from nvfp4_sgl.cutedsl_kernels import launcher
from nvfp4_sgl.cutedsl_kernels.compiled import KernelKey
from nvfp4_sgl.draft_config import DsparkConfig
from nvfp4_sgl.errors import ConfigError
from nvfp4_sgl.memory.pools import table_margin
from nvfp4_sgl.model.contract import Context, Slots
from nvfp4_sgl.model.decoder import Decoder
from nvfp4_sgl.model.dspark import DsparkDraft
from nvfp4_sgl.model.mtp import MtpDraft
from nvfp4_sgl.ops.modes import ActivationMode
from nvfp4_sgl.sglang_defaults import CHUNK, REQUESTS, triton_cache
from nvfp4_sgl.synthetic.dummy import DummyReader
from nvfp4_sgl.targets.choose import choose, mode_of
from nvfp4_sgl.targets.fused import compile_ahead
from nvfp4_sgl.targets.fused.exchange import lone_exchange
from nvfp4_sgl.targets.fused.gemm_planner import DryLauncher, GemmPlanner
from nvfp4_sgl.targets.gpus import Gpu
from nvfp4_sgl.targets.target import descriptor
from nvfp4_sgl.triton_kernels import ahead
from nvfp4_sgl.weights.parallel import TensorParallel, lone_rank

Needed = tuple[Sequence[KernelKey], Sequence[ahead.Variant]]
"""GEMMs and Triton kernels."""
META = torch.device("meta")
"""Tensors with sizes and no storage."""


@dataclass(frozen=True)
class Serving:
    """Everything but the checkpoint that a server's kernels depend on.

    Attributes:
        ranks: ``--tp-size``. context: ``--context-length``. requests: ``--max-running-requests``.
        chunk: ``--chunked-prefill-size``. uniform_experts: whether uniform routing is simulated.
        mode: ``activation_mode``; ``None`` for that of config.json, or else the target's default.
        round_tokens: ``--speculative-num-draft-tokens``, tokens of a request in a pass that verifies the bundled draft;
            0 if nothing is drafted.
        pushed_sums: whether ranks push parts of sums; ``None`` as the environment says, of GPUs that reach each other's
            memory.
    """

    ranks: int
    context: int
    requests: int = REQUESTS
    chunk: int = CHUNK
    uniform_experts: bool = False
    mode: ActivationMode | None = None
    round_tokens: int = 0
    pushed_sums: bool | None = None

    @property
    def rings(self) -> Rings:
        """Rows of the compressors' state rings."""
        return DRAFTED_STATE_RING if self.round_tokens else STATE_RING


def build(
    verified: Verified,
    target: str,
    settings: Sequence[Serving],
    output: Path | None = None,
    gpu: Gpu | None = None,
    given: Path | None = None,
) -> tuple[int, int]:
    """Compile the kernels of servers of one checkpoint.

    Args:
        verified: the checkpoint, or random weights; no values are read.
        output: where the kernels go, those of this user's caches copied; these caches if ``None``.
        gpu: the one that serves; one that the target assumes, if ``None``.
        given: a folder of kernels built ahead of time; a library of GEMMs is not compiled where it has all of them.

    Returns:
        How many GEMMs and Triton kernels these servers need.

    Raises:
        ConfigError: the model cannot be split over so many ranks, or a draft is asked for that is not there.
        LibraryError: a kernel does not compile.
    """
    gpu = gpu or descriptor(target).gpu()
    found = [needed(verified, target, setting, gpu) for setting in settings]
    found += [needed_by_draft(verified, target, setting, gpu) for setting in settings if setting.round_tokens]
    variants = list(dict.fromkeys(variant for _, more in found for variant in more))
    # A library for each number of ranks and for a draft, as servers look for them; one for all where a folder is given.
    libraries = [keys for keys, _ in found] if output is None else [[key for keys, _ in found for key in keys]]
    cache = triton_cache()
    with ahead.cached_in(cache if output is None else output / compile_ahead.TRITON_FOLDER):
        for keys in libraries:
            unique = sorted(set(keys), key=lambda key: key.name)
            folder = output or compile_ahead.folder_of(unique, given)
            if output is not None:
                compile_ahead.copy_cached(unique, variants, output, cache)
            compile_ahead.compile_missing(unique, variants, folder, gpu.capability)
    return len({key for keys, _ in found for key in keys}), len(variants)


def with_distinct_layers(verified: Verified) -> ModelConfig:
    """The checkpoint's configuration with only the first layers, up to the last that is unlike all before it."""
    config, inventory = verified.config, verified.inventory
    storages: dict[int, list[tuple[str, str]]] = {layer: [] for layer in range(config.num_hidden_layers)}
    for name, entry in inventory.entries.items():
        _, found, rest = name.partition("layers.")
        layer, _, tensor = rest.partition(".")
        if found and name.startswith("layers.") and int(layer) in storages:
            storages[int(layer)].append((tensor, entry.dtype))
    kinds = [
        (config.kind(layer), config.is_hash_routed(layer), tuple(sorted(storages[layer])))
        for layer in range(config.num_hidden_layers)
    ]
    count = 1 + max(kinds.index(kind) for kind in kinds)
    return replace(config, num_hidden_layers=count, layer_kinds=config.layer_kinds[:count])


def needed(verified: Verified, target: str, setting: Serving, gpu: Gpu) -> Needed:
    """The GEMMs and Triton kernels of a server on ``gpu``, without its draft's."""

    def of_target(context: Context) -> Needed:
        return _needed(Decoder(context), context, setting)

    return _without_storage(verified, verified.inventory, target, setting, gpu, of_target)


def needed_by_draft(verified: Verified, target: str, setting: Serving, gpu: Gpu) -> Needed:
    """Those of the draft that the checkpoint bundles.

    Raises:
        ConfigError: it bundles none.
    """

    bundled = verified.draft()
    if bundled is None:
        raise ConfigError(
            f"{verified.inventory.directory}: expected a draft under 'mtp.', found none; leave --speculative-algorithm"
            " out"
        )
    kind = bundled.kind

    def of_draft(context: Context) -> Needed:
        draft = _draft(kind, verified, context, setting)
        return _needed(draft, _planned(draft), setting)

    return _without_storage(verified, verified.draft_inventory(), target, setting, gpu, of_draft)


@torch.no_grad()
def _without_storage(
    verified: Verified,
    inventory: Inventory,
    target: str,
    setting: Serving,
    gpu: Gpu,
    find: Callable[[Context], Needed],
) -> Needed:
    """Result of ``find`` on ``gpu``, with the tensors of ``inventory``, without storage."""
    mode = setting.mode or mode_of(target, verified.raw.get("activation_mode"))
    choice, config = choose(target, mode), with_distinct_layers(verified)
    dry = DryLauncher(target, gpu.clusters)
    with launcher.use(dry), ahead.targeting(gpu.capability, gpu.processors):
        context = Context(
            DummyReader(inventory, META),
            config,
            choice.boundaries,
            META,
            torch.bfloat16,
            choice.mode,
            share_of(setting, config.hidden_size, target),
            setting.uniform_experts,
        )
        return find(context)


def share_of(setting: Serving, width: int, target: str) -> TensorParallel:
    """The share of one rank of a server."""
    rank, pushes = lone_rank(setting.ranks), setting.pushed_sums
    if pushes is None:
        pushes = pushed_sums.planned(target=target, ranks=setting.ranks)
    return replace(rank, exchange=lone_exchange(setting.ranks, width, META)) if pushes else rank


def _needed(model: Decoder | MtpDraft | DsparkDraft, context: Context, setting: Serving) -> Needed:
    """The GEMMs and Triton kernels of ``model``, whose passes are planned by ``context``."""
    config = context.config
    # The caches' sizes choose no kernel, those of the table of slots do.
    caches = LocalCaches(config, packed=True, dtype=torch.bfloat16, device=META, rings=setting.rings)
    columns = setting.context + table_margin(setting.round_tokens)
    table = torch.empty(setting.requests + 1, columns, dtype=torch.int32, device=META)
    sizes = setting.requests, setting.context, setting.rings, max(setting.round_tokens, 1)
    slots = Slots(table, caches.full_to_swa.to(META), *sizes)
    planner = context.boundaries.plan(context, slots, caches.layers)
    assert isinstance(planner, GemmPlanner)
    embedding = torch.empty(config.vocab_size, config.hidden_size, dtype=torch.bfloat16, device=META)
    return planner.gemms(setting.chunk), planner.triton_variants(model, embedding, setting.chunk)


def _draft(kind: DraftKind, verified: Verified, context: Context, setting: Serving) -> MtpDraft | DsparkDraft:
    if kind is DraftKind.MTP:
        return MtpDraft(context)
    fields = DsparkConfig.parse(verified.raw, verified.config)
    return DsparkDraft(context, replace(fields, block=setting.round_tokens - 1))


def _planned(draft: MtpDraft | DsparkDraft) -> Context:
    """Context of a draft's planner: layers of windows alone, as many as the draft has blocks."""
    context, matrices = draft.context, draft.context.draft
    assert matrices is not None
    blocks = matrices.stages
    config = replace(context.config, num_hidden_layers=blocks, layer_kinds=(LayerKind.SWA,) * blocks)
    return replace(context, config=config)
