"""An attention layer's boundaries on the CPU (specification §3 to 5)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from nvfp4_sgl.cache.layer import LayerCache
from nvfp4_sgl.cache.plan import BatchPlan
from nvfp4_sgl.cache.rows import RowStore
from nvfp4_sgl.config import LayerKind, LayerSpec
from nvfp4_sgl.model.contract import Activation, Columns, Context, Form, Prepared, Unmultiplied
from nvfp4_sgl.model.rope_tables import frequencies
from nvfp4_sgl.ops.attention import sparse_attention
from nvfp4_sgl.ops.compressor import compress_windows
from nvfp4_sgl.ops.indexer import indexer_query, select_entries, write_index_keys
from nvfp4_sgl.ops.norm import rms_norm
from nvfp4_sgl.ops.rope import apply_rope, rms_norm_rope
from nvfp4_sgl.weights.source import frozen


class CompressorParameters(nn.Module):
    """``ape`` fp32 [ratio, w] and ``norm`` [n] of one compressor; its wkv and wgate are in the first GEMMs."""

    def __init__(self, context: Context, stem: str):
        super().__init__()
        self.ape = frozen(context.read(f"{stem}.ape").float())
        self.norm = frozen(context.read(f"{stem}.norm.weight"))


class ReferenceAttentionInputs(nn.Module):
    """Window rows, compressed entries, index keys, and the normalised q_lora.

    Rounding: GEMM results stay fp32; q_lora is rounded to the model dtype once, behind its norm, keys where they are
    stored.
    """

    def __init__(self, context: Context, layer: LayerSpec):
        super().__init__()
        stem = f"{layer.stem}.attn"
        self._eps, self._ratio, self._dtype = context.config.rms_norm_eps, layer.ratio, context.dtype
        self._frequencies = frequencies(context.config, layer.rope).to(context.device)
        self.q_norm, self.kv_norm = (frozen(context.read(f"{stem}.{name}.weight")) for name in ("q_norm", "kv_norm"))
        self.compressor = CompressorParameters(context, f"{stem}.compressor") if self._ratio else None
        self.index_compressor = None
        if layer.selects:
            self.index_compressor = CompressorParameters(context, f"{stem}.indexer.compressor")

    def forward(self, columns: Columns, x: Activation, step: BatchPlan, cache: LayerCache, form: Form) -> Prepared:
        dtype, eps = self._dtype, self._eps
        kv = rms_norm_rope(columns.kv, self.kv_norm, eps, step.positions, self._frequencies)
        cache.swa.write(step.swa_write_slots, kv)
        if self.compressor is not None and columns.compressor is not None:
            entries = self._compress(columns.compressor, cache.state, step, self.compressor)
            _require(cache.compressed).write(step.compress[self._ratio].window_slots, entries)
        if self.index_compressor is not None and columns.index_compressor is not None:
            keys = self._compress(columns.index_compressor, cache.index_state, step, self.index_compressor)
            write_index_keys(_require(cache.index), step.compress[self._ratio].window_slots, keys)
        q_lora = rms_norm(columns.q_lora, self.q_norm, eps, out_dtype=dtype)
        assert not isinstance(columns.index_weights, Unmultiplied)
        return Prepared(Activation(q_lora), columns.index_weights)

    def _compress(
        self, rows: tuple[Tensor, Tensor], state: Tensor | None, step: BatchPlan, parameters: CompressorParameters
    ) -> Tensor:
        assert state is not None
        return compress_windows(
            *rows,
            state,
            step.compress[self._ratio],
            ape=parameters.ape,
            norm=parameters.norm,
            norm_eps=self._eps,
            frequencies=self._frequencies,
        )


def _require(rows: RowStore | None) -> RowStore:
    assert rows is not None
    return rows


class ReferenceSelection(nn.Module):
    """Score the visible ratio-4 entries and choose each query's: slots int64 [T, K], -1 padded."""

    def __init__(self, context: Context, layer: LayerSpec):
        super().__init__()
        self._config, self._dtype = context.config, context.dtype
        self._frequencies = frequencies(context.config, layer.rope).to(context.device)

    def scores(self, step: BatchPlan) -> bool:
        return True

    def forward(self, index_q: Tensor | None, weights: Tensor, step: BatchPlan, cache: LayerCache) -> Tensor:
        config, keys = self._config, _require(cache.index)
        assert index_q is not None
        q = index_q.to(self._dtype).view(index_q.shape[0], config.index_n_heads, config.index_head_dim)
        q = indexer_query(apply_rope(q, step.positions, self._frequencies), keys)
        scaled = weights * (config.index_head_dim**-0.5 * config.index_n_heads**-0.5)
        return select_entries(q, scaled, keys, step, config.index_topk)


class ReferenceAttentionCore(nn.Module):
    """Query norm and RoPE, one softmax over window, entries and sink, inverse RoPE.

    Rounding: queries as they leave the GEMM, and the output behind the inverse RoPE; fp32 in between.
    """

    def __init__(self, context: Context, layer: LayerSpec):
        super().__init__()
        config, parallel = context.config, context.parallel
        self._config, self._kind, self._dtype = config, layer.kind, context.dtype
        self._frequencies = frequencies(config, layer.rope).to(context.device)
        heads = parallel.heads(config)
        self._heads, self._groups = len(heads), len(parallel.o_groups(config))
        self.attn_sink = frozen(context.read(f"{layer.stem}.attn.attn_sink", rows=slice(heads.start, heads.stop)))

    def forward(self, q: Tensor, step: BatchPlan, cache: LayerCache, entries: Tensor | None, form: Form) -> Activation:
        config, tokens = self._config, q.shape[0]
        q = q.to(self._dtype).view(tokens, self._heads, -1)
        q = rms_norm_rope(q, None, config.rms_norm_eps, step.positions, self._frequencies, out_dtype=torch.float32)
        if self._kind is LayerKind.HCA:
            entries = step.hca_slots
        scale = config.head_dim**-0.5
        o = sparse_attention(q, cache.swa, step.swa_slots, self.attn_sink, scale, cache.compressed, entries)
        o = apply_rope(o, step.positions, self._frequencies, inverse=True).to(self._dtype)
        return Activation(o.reshape(tokens, self._groups, -1))
