"""DeepSeek-V4 attention on a GPU: the kernels of one layer in order (spec sections 3 to 5)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from nvfp4_sgl.cache.layer import LayerCache
from nvfp4_sgl.cache.rows import PackedIndexRows, PackedKvRows, RowStore
from nvfp4_sgl.config import LayerKind
from nvfp4_sgl.errors import UnsupportedError
from nvfp4_sgl.gpu.context import GpuContext
from nvfp4_sgl.gpu.products import GroupedProjection, MergedProjection, multiply
from nvfp4_sgl.gpu.step import Frequencies, Step
from nvfp4_sgl.model.weights import Shard, frozen
from nvfp4_sgl.triton_kernels.attention.sparse_attention import Entries, sparse_attention
from nvfp4_sgl.triton_kernels.attention_inputs.compressor import Compression, Compressor
from nvfp4_sgl.triton_kernels.attention_inputs.latent import Latents
from nvfp4_sgl.triton_kernels.attention_inputs.prepare import prepare_attention
from nvfp4_sgl.triton_kernels.indexer.scores import index_scores
from nvfp4_sgl.triton_kernels.indexer.topk import select_entries


def packed(rows: RowStore | None) -> Entries:
    """The pages behind a row store; :class:`UnsupportedError` unless they are SGLang's packed ones."""
    if not isinstance(rows, PackedKvRows | PackedIndexRows):
        raise UnsupportedError(
            f"cache rows: the GPU kernels read SGLang's packed pages, found {type(rows).__name__};"
            " leave --kv-cache-dtype out, or set it to fp8_e4m3"
        )
    return Entries(rows.pages, rows.page_size)


class Attention(nn.Module):
    """One layer's attention. Holds this rank's heads and o-groups; returns a partial sum over ranks."""

    def __init__(self, context: GpuContext, layer: int, frequencies: Frequencies):
        super().__init__()
        source, config, parallel, device = context.source, context.config, context.parallel, context.device
        stem = f"layers.{layer}.attn"
        self._config, self._kind = config, config.kind(layer)
        ratio = self._kind.value
        self._frequencies = frequencies
        self._heads = config.num_attention_heads // parallel.size
        self._groups = config.o_groups // parallel.size

        def read(name: str) -> nn.Parameter:
            return frozen(source.read(f"{stem}.{name}").to(device))

        from_x = [Shard(f"{stem}.wq_a"), Shard(f"{stem}.wkv")]
        from_q = [Shard(f"{stem}.wq_b", rows=parallel.share(config.num_attention_heads * config.head_dim))]
        self._compressors: list[Compressor] = []
        if ratio:
            from_x += [Shard(f"{stem}.compressor.wkv"), Shard(f"{stem}.compressor.wgate")]
            self.ape, self.norm = read("compressor.ape"), read("compressor.norm.weight")
            self._compressors.append(Compressor(ratio, self.ape.data.float(), self.norm.data, config.rms_norm_eps))
        if self._kind is LayerKind.CSA:
            inner = "indexer.compressor"
            from_x += [Shard(f"{stem}.{inner}.{name}") for name in ("wkv", "wgate")]
            from_x += [Shard(f"{stem}.indexer.weights_proj")]
            from_q += [Shard(f"{stem}.indexer.wq_b")]
            self.index_ape, self.index_norm = read(f"{inner}.ape"), read(f"{inner}.norm.weight")
            self._compressors.append(
                Compressor(ratio, self.index_ape.data.float(), self.index_norm.data, config.rms_norm_eps)
            )
        self.from_x = MergedProjection(source, from_x, device)
        self.from_q = MergedProjection(source, from_q, device)
        self.q_norm, self.kv_norm = read("q_norm.weight"), read("kv_norm.weight")
        heads = parallel.share(config.num_attention_heads)
        self.attn_sink = frozen(source.read(f"{stem}.attn_sink", rows=heads).to(device).float())
        rows = parallel.share(config.o_groups * config.o_lora_rank)
        self.wo_a = GroupedProjection(source, Shard(f"{stem}.wo_a", rows=rows), self._groups, device)
        self.wo_b = MergedProjection(source, [Shard(f"{stem}.wo_b", cols=rows)], device)

    def forward(self, x: Tensor, step: Step, cache: LayerCache) -> Tensor:
        """bf16 [T, d], this rank's part of the output, from the normalised input x, bf16 [T, d].

        All of this pass's cache writes come before any read, so that a query sees the window that it completes.
        """
        config, plan, eps = self._config, step.plan, self._config.rms_norm_eps
        tokens, ratio = x.shape[0], self._kind.value
        turns = step.compressed_turns if ratio else step.window_turns
        window = packed(cache.swa)
        q_lora, kv, *rest = self.from_x(x, torch.float32)
        normed = x.new_empty(q_lora.shape)
        latents = Latents(q_lora, self.q_norm, normed, kv, self.kv_norm, eps, turns, plan.window_write, *window)
        compressions, frequencies = self._compressions(rest, cache), self._frequencies.compressed
        prepare_attention(latents, compressions, plan.batch, frequencies, workspace=step.workspace)

        q, *index_q = self.from_q(normed, torch.bfloat16)
        q = q.view(tokens, self._heads, config.head_dim)
        extra, slots, lengths = None, None, None
        if self._kind is LayerKind.HCA:
            extra, slots, lengths = packed(cache.compressed), plan.entry_slots, plan.entry_lengths
        elif self._kind is LayerKind.CSA:
            extra = packed(cache.compressed)
            slots, lengths = self._select(index_q[0], rest[4], step, packed(cache.index))
        o = sparse_attention(
            q,
            window,
            plan.window_slots,
            self.attn_sink,
            config.head_dim**-0.5,
            extra,
            slots,
            window_lengths=plan.window_lengths,
            extra_lengths=lengths,
            turns=turns,
            query_eps=eps,
            arrivals=step.arrivals,
        )
        z = self.wo_a(o.view(tokens, self._groups, -1))
        return multiply(z, self.wo_b.weight, torch.bfloat16)

    def _compressions(self, parts: list[Tensor], cache: LayerCache) -> list[Compression]:
        """Of the layer's compressors: the columns of the product that they read, and the pools that they write."""
        states, rows = (cache.state, cache.index_state), (cache.compressed, cache.index)
        found = []
        for n, compressor in enumerate(self._compressors):
            state = states[n]
            assert state is not None
            found.append(Compression(compressor, parts[2 * n], parts[2 * n + 1], state, *packed(rows[n])))
        return found

    def _select(self, q: Tensor, weights: Tensor, step: Step, keys: Entries) -> tuple[Tensor, Tensor]:
        """Score the visible ratio-4 entries; slots of the best, int32 [T, index_topk], and how many."""
        config, batch = self._config, step.plan.batch
        heads, dim, topk = config.index_n_heads, config.index_head_dim, config.index_topk
        tokens, factor = q.shape[0], dim**-0.5 * heads**-0.5
        q = q.view(tokens, heads, dim)
        slots = q.new_empty(tokens, topk, dtype=torch.int32)
        lengths = q.new_empty(tokens, dtype=torch.int32)
        rows = step.scores.shape[0]
        for first in range(0, tokens, rows):
            part = slice(first, min(first + rows, tokens))
            scores = step.scores[: part.stop - first]
            query = (q[part], weights[part], step.compressed_turns[part], factor)
            index_scores(*query, *keys, batch, topk, scores, first=first)
            chosen = (slots[part], lengths[part])
            select_entries(scores, batch, topk, *chosen, first=first, candidates=step.candidates)
        return slots, lengths
