"""Plans passes where GEMMs are kernels of ``cutedsl_kernels``: all kernels are ready before the first request."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace

import torch
import triton
from torch import Tensor

from nvfp4_sgl.cache.layer import LayerCache
from nvfp4_sgl.cutedsl_kernels import launcher
from nvfp4_sgl.cutedsl_kernels.common.call import GemmCall
from nvfp4_sgl.cutedsl_kernels.common.clusters import Clusters
from nvfp4_sgl.cutedsl_kernels.compiled import KernelKey
from nvfp4_sgl.cutedsl_kernels.library import Library
from nvfp4_sgl.cutedsl_kernels.plan import Pin
from nvfp4_sgl.cutedsl_kernels.warm_up import keys_for
from nvfp4_sgl.cutedsl_kernels.warm_up import warm_up as warm_up_gemms
from nvfp4_sgl.model.contract import Context, PassRequest, Slots
from nvfp4_sgl.model.decoder import Decoder
from nvfp4_sgl.model.dspark import DsparkDraft
from nvfp4_sgl.model.mtp import MtpDraft
from nvfp4_sgl.targets.fused.compile_ahead import adopt_given, compile_missing, folder_of, given_folder
from nvfp4_sgl.targets.fused.drafts import MAX_PART
from nvfp4_sgl.targets.fused.gemm_backend import Backends
from nvfp4_sgl.targets.fused.planner import FusedPlanner
from nvfp4_sgl.targets.fused.warm_up import warm_up_passes
from nvfp4_sgl.triton_kernels import ahead
from nvfp4_sgl.triton_kernels.attention_inputs.index_weights import padded_tokens
from nvfp4_sgl.weights.gemms import GemmSpec, without_index_queries

logger = logging.getLogger(__name__)


class DryLauncher:
    """Stands for a GPU's launcher: plans are the GPU's, and calls compute nothing."""

    def __init__(
        self, architecture: str, clusters: Clusters, programmatic_launch: bool = True, pin: Pin | None = None
    ) -> None:
        self._architecture, self._clusters = architecture, clusters
        self.programmatic_launch, self.pin = programmatic_launch, pin

    def architecture(self, device: torch.device) -> str:
        return self._architecture

    def clusters(self, device: torch.device) -> Clusters:
        return self._clusters

    def launch(self, key: KernelKey, call: GemmCall, clusters: int) -> None:
        """Launch nothing: the GEMMs that a model needs follow from its sizes."""

    def freeze(self) -> None:
        """Do nothing: this launcher compiles nothing."""


class GemmPlanner(FusedPlanner):
    """Plans passes, and has every kernel compiled, or loads it from a cache, before the first request.

    ``NVFP4_SGL_KERNELS`` names a library of GEMMs (``nvfp4-sgl build``); without one, or where it lacks some, they are
    compiled in parallel and kept in the user's cache folder. Nothing is compiled after the warm-up: a GEMM that was
    overlooked is an error.
    """

    def __init__(self, backends: Backends, context: Context, slots: Slots, caches: Sequence[LayerCache]):
        super().__init__(context, slots, caches)
        launcher.current().pin = context.policy.pin
        self.backends = backends

    def warm_up_passes(self, tokens: int) -> Iterator[PassRequest]:
        """Passes of every kind that kernels are compiled for.

        Quantising kernels are compiled for the token tile of the GEMMs. Routing kernels are compiled for that of the
        experts' GEMMs. The kernel that prepares attention is compiled for the number of tokens whose index weights it
        computes.
        """
        backends = self.backends
        sizes = {(gemm.experts_per_token, gemm.groups) for gemm in self.gemm_specs() if gemm.experts_per_token}

        def kind(count: int) -> Hashable:
            tiles = [backends.expert_token_tile(count * visits, groups) for visits, groups in sorted(sizes)]
            return backends.token_tile(count), *tiles

        def tile(count: int) -> Hashable:
            return backends.token_tile(count), padded_tokens(count)

        return warm_up_passes(self.slots, tokens, self.context.parallel, kind, tile, self.block)

    @torch.no_grad()
    def warm_up(self, decoder: Decoder | MtpDraft | DsparkDraft, table: Tensor, tokens: int) -> None:
        """Compile what is missing; run every GEMM, then every pass; then refuse to compile."""
        runner = launcher.current()
        if isinstance(runner, launcher.CudaLauncher):
            self.compile_missing(decoder, table, tokens)
        warm_up_gemms(self.gemms(tokens), self.context.device)
        with ahead.compiled_here() as late:
            super().warm_up(decoder, table, tokens)
        if late:
            logger.warning(
                "%d Triton kernels were compiled one after the other: they had not been foreseen, or Triton did not"
                " find them in %s: %s", len(late), triton.knobs.cache.dir, dict(Counter(late)),
            )  # fmt: skip
        runner.freeze()

    def compile_missing(self, decoder: Decoder | MtpDraft | DsparkDraft, table: Tensor, tokens: int) -> None:
        """Compile in parallel what passes of up to ``tokens`` tokens need and no cache holds; load the GEMMs.

        Ranks that share a cache share what is compiled.
        """
        given, keys, runner = given_folder(), self.gemms(tokens), launcher.current()
        assert isinstance(runner, launcher.CudaLauncher)
        if given is not None:
            adopt_given(given)
        folder = folder_of(keys, given)
        major, minor = torch.cuda.get_device_capability(self.context.device)
        compile_missing(keys, self.triton_variants(decoder, table, tokens), folder, 10 * major + minor)
        if keys:
            runner.kernels.add(Library(folder))

    def gemms(self, tokens: int) -> Sequence[KernelKey]:
        """The GEMMs that passes of up to ``tokens`` tokens need."""
        context, runner = self.context, launcher.current()
        largest = max(tokens, self.slots.requests * self.slots.drafted)

        def keys(gemms: Sequence[GemmSpec], rows: int, copies: int = 0) -> list[KernelKey]:
            return keys_for(
                gemms,
                rows,
                context.config.swiglu_limit,
                runner.architecture(context.device),
                runner.clusters(context.device),
                programmatic_launch=runner.programmatic_launch,
                pin=runner.pin,
                copies=copies,
            )

        specs = self.gemm_specs()
        found = keys(specs, largest)
        exchange = context.parallel.exchange
        if exchange is not None:
            sending = [spec for spec in specs if spec.sends]
            found += keys(sending, min(largest, exchange.tokens), copies=context.parallel.size - 1)
        if context.draft is not None:
            # A token's streams are rows of these GEMMs, of a part of a pass at a time.
            by_stream = {*context.draft.by_stream}
            several = [spec for spec in specs if by_stream & {shard.stem for shard in spec.shards}]
            found += keys(several, context.config.hc_mult * min(largest, MAX_PART))
        return sorted(set(found), key=lambda key: key.name)

    def gemm_specs(self) -> Sequence[GemmSpec]:
        """The GEMMs of the layers that passes run, on this rank, by the storages of the matrices.

        Where nothing is scored, those that read q_lora are launched without the index queries, too.
        """
        context, target = self.context, self.backends.target
        owner, storage, draft = context.parallel, context.source.storage, context.draft
        if draft is None:
            specs = target.gemms(context.config, owner, storage)
        else:
            specs = target.draft_gemms(context.config, draft.projections, draft.stages, owner, storage)
        found = dict.fromkeys(each for spec in specs for each in (spec, without_index_queries(spec)))
        return [_with_fp32_sums(gemm) for gemm in found] if target.fp32_sums else list(found)

    def triton_variants(
        self, decoder: Decoder | MtpDraft | DsparkDraft, table: Tensor, tokens: int
    ) -> Sequence[ahead.Variant]:
        """The Triton kernels of the warm-up, recorded by passes that launch none."""
        device, runner = self.context.device, launcher.current()
        dry = DryLauncher(runner.architecture(device), runner.clusters(device), runner.programmatic_launch, runner.pin)
        with launcher.use(dry), ahead.recording() as variants:
            FusedPlanner.warm_up(self, decoder, table, tokens)
        return list(variants)


def _with_fp32_sums(gemm: GemmSpec) -> GemmSpec:
    """SM100's GEMM as Hopper's kernels compute it: gate and up in one matrix, and fp32 where scales are to follow."""
    if gemm.gated:
        return replace(gemm, features=2 * gemm.features, gated=False, output="fp32")
    return gemm if gemm.experts_per_token else replace(gemm, output="fp32")
