"""DeepSeek-V4 attention: SWA, CSA and HCA layers (spec sections 3 to 5)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from nvfp4_sgl.cache.layer import LayerCache
from nvfp4_sgl.cache.plan import BatchPlan
from nvfp4_sgl.config import LayerKind
from nvfp4_sgl.model.context import ModelContext
from nvfp4_sgl.model.weights import Projection, Shard, WeightSource, frozen, load_matrix
from nvfp4_sgl.ops.rope import inverse_frequencies


class CompressorParameters(nn.Module):
    """``ape`` fp32 [ratio, w] and ``norm`` [n] of one compressor; its wkv and wgate live in the merged projection."""

    def __init__(self, reader: WeightSource, stem: str):
        super().__init__()
        self.ape = frozen(reader.read(f"{stem}.ape").float())
        self.norm = frozen(reader.read(f"{stem}.norm.weight"))


class Attention(nn.Module):
    """One layer's attention. Holds this rank's heads and o-groups; returns a partial sum over ranks."""

    def __init__(self, context: ModelContext, layer: int):
        super().__init__()
        reader, config, parallel = context.source, context.config, context.parallel
        stem = f"layers.{layer}.attn"
        self._config, self._ops, self._mode = config, context.ops, context.mode
        self._kind = config.kind(layer)
        self._ratio = self._kind.value
        self._heads = config.num_attention_heads // parallel.size
        self._groups = config.o_groups // parallel.size

        from_x = [Shard(f"{stem}.wq_a"), Shard(f"{stem}.wkv")]
        from_q = [Shard(f"{stem}.wq_b", rows=parallel.share(config.num_attention_heads * config.head_dim))]
        if self._ratio:
            from_x += [Shard(f"{stem}.compressor.wkv"), Shard(f"{stem}.compressor.wgate")]
            self.compressor = CompressorParameters(reader, f"{stem}.compressor")
        if self._kind is LayerKind.CSA:
            inner = f"{stem}.indexer.compressor"
            from_x += [Shard(f"{inner}.wkv"), Shard(f"{inner}.wgate"), Shard(f"{stem}.indexer.weights_proj")]
            from_q += [Shard(f"{stem}.indexer.wq_b")]
            self.index_compressor = CompressorParameters(reader, inner)
        self.from_x = Projection(reader, from_x, context.ops, context.mode)
        self.from_q = Projection(reader, from_q, context.ops, context.mode)
        self.q_norm = frozen(reader.read(f"{stem}.q_norm.weight"))
        self.kv_norm = frozen(reader.read(f"{stem}.kv_norm.weight"))
        self.attn_sink = frozen(reader.read(f"{stem}.attn_sink", rows=parallel.share(config.num_attention_heads)))
        o_rows = config.o_groups * config.o_lora_rank
        self.wo_a = load_matrix(reader, [Shard(f"{stem}.wo_a", rows=parallel.share(o_rows))], groups=self._groups)
        self.wo_b = load_matrix(reader, [Shard(f"{stem}.wo_b", cols=parallel.share(o_rows))])
        self._wo_a, self._wo_b = self.wo_a.operand(), self.wo_b.operand()

        base, yarn = (
            (config.compress_rope_theta, config.yarn) if self._ratio else (config.rope_theta, None)
        )  # compressed layers rotate everything by the long-context table
        self._frequencies = inverse_frequencies(config.qk_rope_head_dim, base, yarn)

    def _compress(
        self, kv: Tensor, score: Tensor, state: Tensor, plan: BatchPlan, parameters: CompressorParameters
    ) -> Tensor:
        return self._ops.compress_windows(
            kv,
            score,
            state,
            plan.compress[self._ratio],
            ape=parameters.ape,
            norm=parameters.norm,
            norm_eps=self._config.rms_norm_eps,
            frequencies=self._frequencies,
        )

    def forward(self, x: Tensor, plan: BatchPlan, cache: LayerCache) -> Tensor:
        """fp32 [T, d], this rank's part of the output, from the normalised input x [T, d].

        All of this batch's cache writes come before any read, so that a query sees the window that it completes.
        """
        config, ops, dtype = self._config, self._ops, x.dtype
        tokens, eps, rope = x.shape[0], config.rms_norm_eps, self._frequencies
        q_lora, kv, *compressed = self.from_x(x)
        kv = ops.rms_norm_rope(kv.to(dtype), self.kv_norm, eps, plan.positions, rope, out_dtype=torch.float32)
        cache.swa.write(plan.swa_write_slots, kv)
        if self._ratio:
            assert cache.compressed is not None and cache.state is not None
            entries = self._compress(compressed[0], compressed[1], cache.state, plan, self.compressor)
            cache.compressed.write(plan.compress[self._ratio].window_slots, entries)

        q_lora = ops.rms_norm(q_lora.to(dtype), self.q_norm, eps)
        q, *index_q = self.from_q(q_lora)
        q = ops.rms_norm_rope(q.to(dtype).view(tokens, self._heads, -1), None, eps, plan.positions, rope)

        extra_slots: Tensor | None = None
        if self._kind is LayerKind.HCA:
            extra_slots = plan.hca_slots
        elif self._kind is LayerKind.CSA:
            extra_slots = self._select(index_q[0].to(dtype), compressed[2:], plan, cache)
        o = ops.sparse_attention(
            q, cache.swa, plan.swa_slots, self.attn_sink, config.head_dim**-0.5, cache.compressed, extra_slots
        )
        o = ops.apply_rope(o, plan.positions, rope, inverse=True)
        z = ops.grouped_linear(o.reshape(tokens, self._groups, -1), self._wo_a, self._mode).to(dtype)
        return ops.linear(z.reshape(tokens, -1), self._wo_b, self._mode)

    def _select(self, index_q: Tensor, parts: list[Tensor], plan: BatchPlan, cache: LayerCache) -> Tensor:
        """Write the indexer's new keys, score, and choose each query's entries."""
        config, ops = self._config, self._ops
        kv, score, weights = parts
        assert cache.index is not None and cache.index_state is not None
        keys = self._compress(kv, score, cache.index_state, plan, self.index_compressor)
        ops.write_index_keys(cache.index, plan.compress[self._ratio].window_slots, keys)
        q = index_q.view(index_q.shape[0], config.index_n_heads, config.index_head_dim)
        q = ops.indexer_query(ops.apply_rope(q, plan.positions, self._frequencies), cache.index)
        scaled = weights * (config.index_head_dim**-0.5 * config.index_n_heads**-0.5)
        return ops.select_entries(q, scaled, cache.index, plan, config.index_topk)
