"""The targets, one object each, with everything that the rest of the package asks of them. Needs no torch.

A target is complete or absent: no boundary falls back to another target's. :func:`targets` lists them: those of this
package, :data:`TARGETS`, and those that installed packages add under the entry point group :data:`GROUP`
(docs/add_a_target.md). The command line and the configuration name a target by a word; where two targets share one,
they differ in their modes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nvfp4_sgl.checkpoint.names import TensorSpec
from nvfp4_sgl.checkpoint.storage import Storage
from nvfp4_sgl.config import ModelConfig
from nvfp4_sgl.errors import UnsupportedError
from nvfp4_sgl.extensions import added, imported
from nvfp4_sgl.ops.modes import ActivationMode
from nvfp4_sgl.targets.arrival import Arrival
from nvfp4_sgl.weights.gemms import (
    BY_KIND,
    TOGETHER,
    GemmSpec,
    KindOf,
    MergeRule,
    OperandKind,
    draft_gemms,
    launched_gemms,
)
from nvfp4_sgl.weights.parallel import Ownership

if TYPE_CHECKING:
    from nvfp4_sgl.model.contract import AnyBoundaries
    from nvfp4_sgl.targets.gpus import Gpu

GROUP = "nvfp4_sgl.targets"
"""Entry points of this group are descriptors of other packages."""


StorageOf = Callable[[str], Storage]
"""The storage of a matrix, by its name without suffix."""


@dataclass(frozen=True)
class Descriptor:
    """One target.

    Attributes:
        name: its own.
        word: the word for it on the command line.
        modes: what may enter GEMMs with quantised weights; the first is the default.
        on_gpu: whether its kernels limit sizes, and its activations are bf16.
        capabilities: of CUDA devices that it is for.
        dtypes: values of ``--dtype``. kv_cache_dtypes: values of ``--kv-cache-dtype``.
        runs: what it multiplies with, by how a matrix arrives; ``None`` if it refuses the matrix.
        kinds: of operands of a matrix's GEMM, by how the matrix arrives; bf16 unless given.
        merge: which matrices it computes at once.
        boundaries_in: ``module:function`` that gives the implementation of each boundary.
        gemm_bytes_in: ``module:function``: bytes of a GEMM's weights on a rank, by :class:`GemmSpec` and storages.
        only_nvfp4_experts: whether routed experts must be NVFP4.
        stacks_experts: whether the routed experts of a layer are one matrix, all NVFP4 or none.
        fp32_sums: whether GEMMs write fp32 that a launch of its own rounds.
        drafts: whether a server drafts on it (``--speculative-algorithm``). drafts_blocks: whether by DSpark, too.
        gpu_in: ``module:name`` of the :class:`~nvfp4_sgl.targets.gpus.Gpu` that ``build`` compiles for; empty if
            nothing is compiled ahead.
        note: how far it is from what it should do, or how it is known; empty if neither.
    """

    name: str
    word: str
    modes: tuple[ActivationMode, ...]
    on_gpu: bool
    capabilities: tuple[tuple[int, int], ...]
    dtypes: tuple[str, ...]
    kv_cache_dtypes: tuple[str, ...]
    runs: Mapping[Arrival, str | None]
    kinds: Mapping[Arrival, OperandKind]
    merge: MergeRule
    boundaries_in: str
    gemm_bytes_in: str
    only_nvfp4_experts: bool = False
    stacks_experts: bool = False
    fp32_sums: bool = False
    drafts: bool = False
    drafts_blocks: bool = False
    gpu_in: str = ""
    note: str = ""

    def boundaries(self) -> AnyBoundaries:
        """The implementation of each boundary; imports it."""
        found: AnyBoundaries = imported(self.boundaries_in)()
        return found

    def gpu(self) -> Gpu:
        """The GPU that ``build`` compiles for, where there is none; the target has one."""
        found: Gpu = imported(self.gpu_in)
        return found

    def gemm_bytes(self, gemm: GemmSpec, storage: StorageOf) -> int:
        """Bytes of a GEMM's weights on a rank."""
        return int(imported(self.gemm_bytes_in)(gemm, storage))

    def kind_of(self, storage: Storage) -> OperandKind:
        """The kind of operands of a GEMM all of whose matrices are in ``storage``, one that the target runs."""
        return self.kinds.get(Arrival.of(storage), "bf16")

    def gemms(
        self, config: ModelConfig, owner: Ownership, storage: StorageOf, stage: range | None = None
    ) -> list[GemmSpec]:
        """The GEMMs of a pass through a stage, all layers unless given, on the rank that is ``owner``, in their order.

        Raises:
            ConfigError: the model cannot be split so.
        """
        return launched_gemms(config, owner, self._kind_by(storage), self.merge, stage)

    def draft_gemms(
        self, config: ModelConfig, projections: Sequence[TensorSpec], stages: int, owner: Ownership, storage: StorageOf
    ) -> list[GemmSpec]:
        """The same of a draft, as of :func:`nvfp4_sgl.weights.gemms.draft_gemms`."""
        return draft_gemms(config, projections, stages, owner, self._kind_by(storage), self.merge)

    def _kind_by(self, storage: StorageOf) -> KindOf:
        return lambda stem: self.kind_of(storage(stem))


GPU_DTYPES, GPU_KV_CACHE_DTYPES = ("auto", "bfloat16"), ("auto", "fp8_e4m3")
_NOT_ROUTED = "(routed experts: refused)"

CPU = Descriptor(
    name="cpu",
    word="cpu",
    modes=(ActivationMode.W4A16, ActivationMode.W4A4),
    on_gpu=False,
    capabilities=(),
    dtypes=("auto", "float32", "float", "bfloat16"),
    kv_cache_dtypes=("auto", "bfloat16", "fp8_e4m3"),
    runs={
        Arrival.NVFP4: "decoded to fp32 at load, global scale apart",
        Arrival.MXFP8: "fp32",
        Arrival.SCALED: "fp32",
        Arrival.PLAIN: "fp32",
    },
    kinds={},
    merge=TOGETHER,
    boundaries_in="nvfp4_sgl.targets.reference:boundaries",
    gemm_bytes_in="nvfp4_sgl.targets.weight_bytes:decoded",
    stacks_experts=True,
    drafts=True,
    drafts_blocks=True,
)
HOPPER = Descriptor(
    name="hopper",
    word="sm_90a",
    modes=(ActivationMode.W4A16,),
    on_gpu=True,
    capabilities=((9, 0),),
    dtypes=GPU_DTYPES,
    kv_cache_dtypes=GPU_KV_CACHE_DTYPES,
    runs={
        Arrival.NVFP4: "packed, expanded in registers (routed experts: if all of the layer are; else bf16)",
        Arrival.MXFP8: "packed, expanded in registers (merged with other storages, or a routed expert: bf16)",
        Arrival.SCALED: "bf16, rounded at load",
        Arrival.PLAIN: "bf16, rounded at load",
    },
    kinds={Arrival.NVFP4: "nvfp4", Arrival.MXFP8: "fp8"},
    merge=TOGETHER,
    boundaries_in="nvfp4_sgl.targets.fused:w4a16_boundaries",
    gemm_bytes_in="nvfp4_sgl.targets.weight_bytes:hopper",
    drafts=True,
    drafts_blocks=True,
    gpu_in="nvfp4_sgl.targets.gpus:H200",
    note="matrices that are not NVFP4 are dequantised to bf16 at load, with one routed expert all experts of its layer."
    " FP8 ones with UE8M0 scales stay FP8; servers of tiny models have run so on an H200",
)
SM100 = Descriptor(
    name="sm100",
    word="sm_100a",
    modes=(ActivationMode.W4A4,),
    on_gpu=True,
    capabilities=((10, 0), (10, 3)),
    dtypes=GPU_DTYPES,
    kv_cache_dtypes=GPU_KV_CACHE_DTYPES,
    runs={
        Arrival.NVFP4: "packed, on the NVFP4 tensor cores",
        Arrival.MXFP8: f"every value as it is, on the MXFP8 tensor cores {_NOT_ROUTED}",
        Arrival.SCALED: None,
        Arrival.PLAIN: f"bf16, rounded at load {_NOT_ROUTED}",
    },
    kinds={Arrival.NVFP4: "nvfp4", Arrival.MXFP8: "mxfp8"},
    merge=BY_KIND,
    boundaries_in="nvfp4_sgl.targets.fused:sm100_boundaries",
    gemm_bytes_in="nvfp4_sgl.targets.weight_bytes:sm100",
    gpu_in="nvfp4_sgl.targets.gpus:B200",
    only_nvfp4_experts=True,
    drafts=True,
    drafts_blocks=True,
    note="executed in an emulator only, never yet on a Blackwell GPU: run launch/check_gpu first",
)
HOPPER_W4A4 = Descriptor(
    name="hopper_w4a4",
    word="sm_90a",
    modes=(ActivationMode.W4A4,),
    on_gpu=True,
    capabilities=((9, 0),),
    dtypes=GPU_DTYPES,
    kv_cache_dtypes=GPU_KV_CACHE_DTYPES,
    runs=SM100.runs,
    kinds=SM100.kinds,
    merge=SM100.merge,
    boundaries_in="nvfp4_sgl.targets.fused:w4a4_on_hopper_boundaries",
    gemm_bytes_in="nvfp4_sgl.targets.weight_bytes:hopper_w4a4",
    gpu_in="nvfp4_sgl.targets.gpus:H200",
    only_nvfp4_experts=True,
    fp32_sums=True,
    drafts=True,
    drafts_blocks=True,
    note="activations are rounded to NVFP4 and MXFP8 as on SM100 and multiplied in bf16, for accuracy and not for"
    " speed; servers of tiny models have run so on an H200",
)
TARGETS = (CPU, HOPPER, HOPPER_W4A4, SM100)
"""This package's."""


@functools.cache
def targets() -> tuple[Descriptor, ...]:
    """Every target; where several share a word, the first is chosen unless a mode is asked for.

    Raises:
        UnsupportedError: what another package adds cannot be imported, is no target, or is one that is there already.
    """
    found = list(TARGETS)
    for where, one in added(GROUP, Descriptor):
        for each in found:
            if each.name == one.name or (each.word == one.word and {*each.modes} & {*one.modes}):
                raise UnsupportedError(
                    f"{where}: expected a name, and modes for its word, that no target has, found those of {each.name};"
                    " change them, or remove that package"
                )
            if each.word != one.word and {*each.capabilities} & {*one.capabilities}:
                raise UnsupportedError(
                    f"{where}: expected capabilities of its own, found some of {each.name}; change them, or"
                    " remove that package"
                )
        found.append(one)
    return tuple(found)


def words() -> tuple[str, ...]:
    """The words that name targets on the command line."""
    return tuple(dict.fromkeys(each.word for each in targets()))


def modes(word: str) -> tuple[ActivationMode, ...]:
    """Modes of the targets of that word for GEMMs with quantised weights; the first is the default."""
    return tuple(mode for each in targets() if each.word == word for mode in each.modes)


def descriptor(word: str, mode: ActivationMode | None = None) -> Descriptor:
    """The target of that word in ``mode``, its default unless given.

    Raises:
        UnsupportedError: no target has that word, or none of that word has the mode.
    """
    found = [each for each in targets() if each.word == word]
    if not found:
        raise UnsupportedError(f"target {word!r}: expected one of {', '.join(words())}")
    if mode is None:
        return found[0]
    for each in found:
        if mode in each.modes:
            return each
    known = ", ".join(each.value for each in modes(word))
    raise UnsupportedError(f"activation_mode {mode.value!r}: on {word} expected one of {known}")
