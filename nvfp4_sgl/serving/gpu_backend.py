"""The attention backend on a GPU: each pass is planned on the device, in decode inside the captured graph."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from nvfp4_sgl.gpu.attention import packed
from nvfp4_sgl.gpu.step import Step
from nvfp4_sgl.gpu.warm_up import warm_up
from nvfp4_sgl.serving import sglang_private as private
from nvfp4_sgl.serving.backend import PoolBackend


class GpuAttentionBackend(PoolBackend):
    """Prepares a :class:`Step` for every forward pass.

    A captured decode graph reads lengths, positions and request slots where SGLang's runner keeps them, and resolves
    slots in its first kernels; a replay needs nothing from here. Eager decode uses sizes of the same maxima, so that
    both give the same bits.
    """

    def __init__(self, runner: Any):
        super().__init__(runner)
        for cache in self.caches:
            packed(cache.swa)  # refuse exact rows now rather than at the first request
        self._longest = int(runner.model_config.context_len)
        self._frequencies, self._scratch = runner.model.decoder.frequencies, runner.model.decoder.scratch
        self._scores: Tensor | None = None
        warm_up(
            runner.model.decoder,
            self.config,
            runner.model.embed.weight,
            self.caches,
            self.req_to_token_pool.req_to_token,
            private.full_to_swa_mapping(self.token_to_kv_pool),
            tokens=private.largest_prefill(),
            requests=self.req_to_token_pool.size,
            longest=self._longest,
        )

    def _step(self, forward_batch: Any, *, longest: int, decode: bool, scores: Tensor | None = None) -> Step:
        return Step.allocate(
            self.config,
            self._scratch,
            forward_batch.positions,
            forward_batch.req_pool_indices,
            self.req_to_token_pool.req_to_token,
            private.full_to_swa_mapping(self.token_to_kv_pool),
            longest=longest,
            decode=decode,
            scores=scores,
        )

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Plan an eager pass."""
        mode = forward_batch.forward_mode
        if mode.is_idle():
            self.plan = None
        elif mode.is_decode():
            self.plan = self._step(forward_batch, longest=self._longest, decode=True)
            self.plan.prepare(self._frequencies, forward_batch.seq_lens, None)
        else:
            longest = int(forward_batch.seq_lens_cpu.max())
            self.plan = self._step(forward_batch, longest=longest, decode=False)
            self.plan.prepare(self._frequencies, forward_batch.seq_lens, forward_batch.extend_seq_lens)

    def shared_read_ends(self, mode: Any) -> Any:
        """Compressors and indexers read the scheduler's tables of slots up to the last layer: it must wait that long.

        SGLang's default lets it go on as soon as the slots are resolved. A request that has just ended still runs one
        step then; with its row given to another, that step would write into the other's pages.
        """
        ends = private.SharedReadEnds
        return ends.POST_REPLAY if mode.is_decode() else ends.UNKNOWN

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Index scores of the largest graph; graphs run one at a time and share them."""
        self._scores = Step.new_scores(self.config, max_bs, self._longest, self.device)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Before a capture: the graph's own room. Before a replay: nothing."""
        if in_capture:
            assert self._scores is not None, "init_cuda_graph_state has not run"
            self.plan = self._step(forward_batch, longest=self._longest, decode=True, scores=self._scores)

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """Recorded: slots of the graph's tokens from the runner's buffers."""
        self.plan.prepare(self._frequencies, forward_batch.seq_lens, None)
