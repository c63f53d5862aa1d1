"""``nvfp4-sgl build``: compile every kernel that a server of a checkpoint needs, on any machine.

The checkpoint's model is built with tensors that have sizes and no storage, and its warm-up is followed without a
launch (:mod:`nvfp4_sgl.targets.fused.compile_ahead`). So neither a GPU nor memory for weights is needed, and
config.json is enough. The machine that serves needs the same Triton, CuTeDSL and version of this package.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from nvfp4_sgl.cache.local import LocalCaches
from nvfp4_sgl.checkpoint.verified import Verified
from nvfp4_sgl.config import ModelConfig
from nvfp4_sgl.cutedsl_kernels import launcher
from nvfp4_sgl.cutedsl_kernels.compiled import KernelKey
from nvfp4_sgl.model.contract import Context, Slots
from nvfp4_sgl.model.decoder import Decoder
from nvfp4_sgl.ops.modes import ActivationMode
from nvfp4_sgl.sglang_defaults import CHUNK, REQUESTS
from nvfp4_sgl.synthetic.dummy import DummyReader
from nvfp4_sgl.targets.choose import choose, mode_of
from nvfp4_sgl.targets.fused import compile_ahead
from nvfp4_sgl.targets.fused.gemm_planner import DryLauncher, GemmPlanner
from nvfp4_sgl.targets.gpus import Gpu
from nvfp4_sgl.targets.target import descriptor
from nvfp4_sgl.triton_kernels import ahead
from nvfp4_sgl.weights.parallel import lone_rank

META = torch.device("meta")
"""Tensors with sizes and no storage."""
EXTRA_TOKENS = 4
"""Columns that SGLang adds to a table of slots."""


@dataclass(frozen=True)
class Serving:
    """Everything but the checkpoint that a server's kernels depend on.

    Attributes:
        ranks: ``--tp-size``. context: ``--context-length``. requests: ``--max-running-requests``.
        chunk: ``--chunked-prefill-size``. uniform_experts: whether uniform routing is simulated.
        mode: ``activation_mode``; ``None`` for that of config.json, or else the target's default.
    """

    ranks: int
    context: int
    requests: int = REQUESTS
    chunk: int = CHUNK
    uniform_experts: bool = False
    mode: ActivationMode | None = None


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
        output: where the kernels go; this user's caches if ``None``.
        gpu: the one that serves; one that the target assumes, if ``None``.
        given: a folder of kernels built ahead of time; a library of GEMMs is not compiled where it has all of them.

    Returns:
        How many GEMMs and Triton kernels these servers need.

    Raises:
        ConfigError: the model cannot be split over so many ranks.
        LibraryError: a kernel does not compile.
    """
    gpu = gpu or descriptor(target).gpu()
    found = [needed(verified, target, setting, gpu) for setting in settings]
    variants = list(dict.fromkeys(variant for _, more in found for variant in more))
    # A library for each number of ranks, as servers look for them; one for all where a folder is given.
    libraries = [keys for keys, _ in found] if output is None else [[key for keys, _ in found for key in keys]]
    with ahead.cached_in(None if output is None else output / compile_ahead.TRITON_FOLDER):
        for keys in libraries:
            unique = sorted(set(keys), key=lambda key: key.name)
            folder = output or compile_ahead.folder_of(unique, given)
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


@torch.no_grad()
def needed(
    verified: Verified, target: str, setting: Serving, gpu: Gpu
) -> tuple[Sequence[KernelKey], Sequence[ahead.Variant]]:
    """The GEMMs and Triton kernels of a server on ``gpu``."""
    mode = setting.mode or mode_of(target, verified.raw.get("activation_mode"))
    choice, config = choose(target, mode), with_distinct_layers(verified)
    dry = DryLauncher(target, gpu.clusters)
    with launcher.use(dry), ahead.targeting(gpu.capability, gpu.processors):
        context = Context(
            DummyReader(verified.inventory, META),
            config,
            choice.boundaries,
            META,
            torch.bfloat16,
            choice.mode,
            lone_rank(setting.ranks),
            setting.uniform_experts,
        )
        decoder = Decoder(context)
        # The caches' sizes choose no kernel, those of the table of slots do.
        caches = LocalCaches(config, packed=True, dtype=torch.bfloat16, device=META)
        columns = setting.context + EXTRA_TOKENS
        table = torch.empty(setting.requests + 1, columns, dtype=torch.int32, device=META)
        slots = Slots(table, caches.full_to_swa.to(META), setting.requests, setting.context)
        planner = choice.boundaries.plan(context, slots, caches.layers)
        assert isinstance(planner, GemmPlanner)
        embedding = torch.empty(config.vocab_size, config.hidden_size, dtype=torch.bfloat16, device=META)
        return planner.gemms(setting.chunk), planner.triton_variants(decoder, embedding, setting.chunk)
