"""Refuses by name what a target's kernels do not take, before any weight is read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from nvfp4_sgl.checkpoint.drafts import Draft
from nvfp4_sgl.checkpoint.names import Role, TensorSpec, tensor_specs
from nvfp4_sgl.checkpoint.storage import Storage
from nvfp4_sgl.config import LayerSpec, ModelConfig
from nvfp4_sgl.errors import CheckpointError, ConfigError, UnsupportedError
from nvfp4_sgl.limits import FEATURE_MULTIPLE, GATED_FEATURE_MULTIPLE, GEMM_K_MULTIPLE, MAX_STACKED_EXPERTS
from nvfp4_sgl.ops.modes import ActivationMode
from nvfp4_sgl.targets.arrival import Arrival
from nvfp4_sgl.targets.kernel_sizes import check_kernel_sizes
from nvfp4_sgl.targets.target import Descriptor, descriptor
from nvfp4_sgl.weights.gemms import GemmSpec
from nvfp4_sgl.weights.layout import expert_matrices
from nvfp4_sgl.weights.parallel import Ownership

SHOWN = 4
"""Matrices that an error lists at most."""


def check_target(
    target: str,
    config: ModelConfig,
    ranks: int,
    storage: Callable[[str], Storage],
    mode: ActivationMode | None = None,
    longest: int | None = None,
) -> None:
    """Refuse a model that ``target`` cannot run on one of ``ranks`` ranks.

    Args:
        storage: of a matrix, by its name without suffix.
        mode: what enters GEMMs with quantised weights; the target's default unless given. In ``w4a4`` Hopper takes what
            SM100 takes.
        longest: tokens of the longest sequence that may come; ``max_position_embeddings`` unless given.

    Raises:
        UnsupportedError: matrices are stored in a format that the target's GEMMs do not read; they are named.
        CheckpointError: matrices that are merged are NVFP4 in part; they are named.
        ConfigError: sizes, numbers of experts or ranks that no kernel takes.
    """
    where, chosen = _chosen(target, mode)
    _check_merged(chosen, where, config.layers(), config, storage)
    if not chosen.on_gpu:
        return
    matrices = _check_storages(chosen, where, tensor_specs(config).values(), storage)
    if config.n_routed_experts > MAX_STACKED_EXPERTS and any(storage(name).is_nvfp4 for name in matrices):
        raise ConfigError(
            f"{where}: n_routed_experts is {config.n_routed_experts}, expected at most {MAX_STACKED_EXPERTS}; serve"
            " another model, or this one on a CPU"
        )
    for product in _kernels(chosen, config, ranks, storage):
        rows = GATED_FEATURE_MULTIPLE if product.gated else FEATURE_MULTIPLE
        for what, value, multiple in (("K", product.k, GEMM_K_MULTIPLE), ("features", product.features, rows)):
            if value % multiple:
                raise ConfigError(
                    f"{where}, --tp-size {ranks}: {product.name}: {what} is {value}, expected a multiple"
                    f" of {multiple}; use a smaller --tp-size, or another model"
                )
    check_kernel_sizes(where, config, config.max_position_embeddings if longest is None else longest)


def check_draft(target: str, draft: Draft, config: ModelConfig, mode: ActivationMode | None = None) -> None:
    """Refuse a draft that ``target`` cannot run; the arguments and errors are those of :func:`check_target`."""
    where, chosen = _chosen(target, mode)
    where = f"{where}: {draft.kind} draft"
    _check_merged(chosen, where, map(config.draft_layer, range(draft.stages)), config, draft.storages.__getitem__)
    if chosen.on_gpu:
        _check_storages(chosen, where, draft.specs.values(), draft.storages.__getitem__)


def _chosen(target: str, mode: ActivationMode | None) -> tuple[str, Descriptor]:
    """The target in words, and itself."""
    chosen = descriptor(target, mode)
    if mode is None or chosen is descriptor(target):
        return f"target {target}", chosen
    return f"target {target}, activation_mode {mode.value}", chosen


def _check_storages(
    chosen: Descriptor, where: str, specs: Iterable[TensorSpec], storage: Callable[[str], Storage]
) -> list[str]:
    """Refuse matrices in storages that the target does not run; returns the names of all."""
    matrices = {spec.name: spec.role for spec in specs if spec.role in (Role.LINEAR, Role.EXPERT_LINEAR)}
    refused = [
        f"'{name}.weight' ({storage(name).value})"
        for name, role in matrices.items()
        if not _runs(chosen, role, storage(name))
    ]
    if refused:
        more = f" and {len(refused) - SHOWN} more" if len(refused) > SHOWN else ""
        raise UnsupportedError(
            f"{where}: {len(refused)} of {len(matrices)} matrices are in storages that it does not run:"
            f" {', '.join(refused[:SHOWN])}{more}; expected routed experts in NVFP4, or in MXFP4, which is read as"
            " NVFP4. Others may also be FP8 with UE8M0 scales, or BF16 (docs/formats.md). Make such a checkpoint with"
            " 'nvfp4-sgl convert', have the server convert while it loads (docs/convert.md), or serve this one on"
            " Hopper in activation_mode w4a16, or on a CPU"
        )
    return list(matrices)


def _kernels(
    chosen: Descriptor, config: ModelConfig, ranks: int, storage: Callable[[str], Storage]
) -> Iterable[GemmSpec]:
    """The GEMMs whose sizes a kernel of ours must take; those of bf16 are a library's.

    Matrices that are merged are one GEMM, so it is their rows together that count: the columns of its result begin at
    whole heads or latents, and are read by Triton kernels that know their sizes.
    """
    distinct = dict.fromkeys(chosen.gemms(config, Ownership(size=ranks), storage))
    return [gemm for gemm in distinct if gemm.kind != "bf16"]


def _runs(chosen: Descriptor, role: Role, storage: Storage) -> bool:
    """Whether a target runs a matrix of that role."""
    if chosen.only_nvfp4_experts and role is Role.EXPERT_LINEAR:
        return storage.is_nvfp4
    return chosen.runs[Arrival.of(storage)] is not None


def _check_merged(
    chosen: Descriptor,
    where: str,
    layers: Iterable[LayerSpec],
    config: ModelConfig,
    storage: Callable[[str], Storage],
) -> None:
    """Refuse merged matrices of which some are NVFP4: gate and up; if experts are stacked, all routed ones of a layer.

    Where matrices are merged by kind, a shared expert whose matrices arrive differently is refused, too.
    """
    for layer in layers:
        *routed, shared = expert_matrices(config, layer, Ownership())
        merged = [[shard.stem for shard in expert.gate_up] for expert in (*routed, shared)]
        if chosen.stacks_experts:
            merged.append([stem for stems in merged[:-1] for stem in stems])
            merged.append([expert.down.stem for expert in routed])
        for stems in merged:
            _require_alike(where, storage, {storage(stem).is_nvfp4: stem for stem in reversed(stems)})
        if chosen.merge.by_kind:
            stems = [shard.stem for shard in shared.shards]
            _require_alike(where, storage, {Arrival.of(storage(stem)): stem for stem in reversed(stems)})


def _require_alike(where: str, storage: Callable[[str], Storage], kinds: Mapping[Any, str]) -> None:
    """CheckpointError if there are several ``kinds``, each with a matrix of its kind."""
    if len(kinds) > 1:
        found = " and ".join(f"'{stem}' {storage(stem).value}" for stem in kinds.values())
        raise CheckpointError(
            f"{where}: matrices that are merged must all be NVFP4 or all be not; found {found}. On SM100 those of a"
            " shared expert must be stored alike. Quantise all of them or none"
        )
