"""The boundaries of an attention layer on a GPU (specification §3 to §5)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from nvfp4_sgl.cache.layer import LayerCache
from nvfp4_sgl.cache.layout import Rings
from nvfp4_sgl.cache.rows import PackedRows, RowStore
from nvfp4_sgl.config import LayerKind, LayerSpec
from nvfp4_sgl.errors import UnsupportedError
from nvfp4_sgl.model.contract import Activation, Columns, Context, Form, Prepared, Unmultiplied
from nvfp4_sgl.model.policy import Choice
from nvfp4_sgl.model.rope_tables import frequencies
from nvfp4_sgl.targets.fused.activations import in_form, new_rows
from nvfp4_sgl.targets.fused.gemm_bf16 import multiply_small
from nvfp4_sgl.targets.fused.step import Step
from nvfp4_sgl.triton_kernels.attention.sparse_attention import Entries, sparse_attention
from nvfp4_sgl.triton_kernels.attention.tiling import fuses_quantization
from nvfp4_sgl.triton_kernels.attention_inputs.compressor import Compression, Compressor
from nvfp4_sgl.triton_kernels.attention_inputs.index_weights import MAX_TOKENS, IndexWeights
from nvfp4_sgl.triton_kernels.attention_inputs.latent import Latents
from nvfp4_sgl.triton_kernels.attention_inputs.prepare import prepare_attention
from nvfp4_sgl.triton_kernels.indexer.scores import index_scores
from nvfp4_sgl.triton_kernels.indexer.topk import select_entries
from nvfp4_sgl.weights.source import frozen

HCA_ENTRIES = 128
"""Most ratio-128 entries, those of 16,384 tokens, that HCA's attention is tiled for where a graph may hold it. A graph
has columns for the longest context, but its requests are mostly short: 16 requests with 8 entries take 14.2 µs instead
of 16.6 (``launch/results/tunings_h200.md``)."""

UNSCORED_MIN_TOKENS = 128
"""Tokens of a pass from which index queries are left out where none is scored. With fewer, GEMMs split K by the number
of features, so that a token's bits would depend on whether any is scored."""


def packed(rows: RowStore | None) -> Entries:
    """The pages of a row store.

    Raises:
        UnsupportedError: they are not SGLang's packed pages.
    """
    if not isinstance(rows, PackedRows):
        raise UnsupportedError(
            f"cache rows: the GPU kernels read SGLang's packed pages, found {type(rows).__name__};"
            " leave --kv-cache-dtype out, or set it to fp8_e4m3"
        )
    return Entries(rows.pages, rows.page_size)


class FusedCompressor(nn.Module):
    """The parameters of one compressor: ``ape`` fp32 [ratio, w] and ``norm`` [n] (specification §4.1)."""

    def __init__(self, context: Context, stem: str, ratio: int):
        super().__init__()
        self.ape = frozen(context.read(f"{stem}.ape").float())
        self.norm = frozen(context.read(f"{stem}.norm.weight"))
        self.parameters_ = Compressor(ratio, self.ape.data, self.norm.data, context.config.rms_norm_eps)

    def compression(
        self, columns: tuple[Tensor, Tensor], state: Tensor | None, rows: RowStore | None, rings: Rings
    ) -> Compression:
        """The compressor's operands in a pass: the columns that it reads and the pools that it writes."""
        assert state is not None
        return Compression(self.parameters_, *columns, state, *packed(rows), rings[self.parameters_.ratio])


class FusedAttentionInputs(nn.Module):
    """Latents, window rows, compressed entries, index keys and compressor states, in one or two launches.

    Index weights of up to ``MAX_TOKENS`` tokens are computed in the same launch, of more in one before.
    """

    def __init__(self, context: Context, layer: LayerSpec):
        super().__init__()
        stem, ratio = f"{layer.stem}.attn", layer.ratio
        self._eps, self._table = context.config.rms_norm_eps, layer.rope
        self._frequencies = frequencies(context.config, layer.rope).to(context.device)
        self.q_norm, self.kv_norm = (frozen(context.read(f"{stem}.{name}.weight")) for name in ("q_norm", "kv_norm"))
        self.compressor = FusedCompressor(context, f"{stem}.compressor", ratio) if ratio else None
        self.index_compressor = None
        if layer.selects:
            self.index_compressor = FusedCompressor(context, f"{stem}.indexer.compressor", ratio)

    def forward(self, columns: Columns, x: Activation, step: Step, cache: LayerCache, form: Form) -> Prepared:
        (tokens, width), device = columns.q_lora.shape, columns.q_lora.device
        q_lora = Activation(
            torch.empty(tokens, width, dtype=torch.bfloat16, device=device) if Form.VALUES in form else None,
            new_rows(tokens, width, device) if Form.NVFP4 in form else None,
        )
        latents = Latents(
            q_lora=columns.q_lora,
            q_norm=self.q_norm,
            q_out=q_lora.values,
            q_rows=q_lora.rows,
            kv=columns.kv,
            kv_norm=self.kv_norm,
            eps=self._eps,
            cos_sin=step.cos_sin[self._table],
            slots=step.plan.window_write,
            pages=packed(cache.swa).pages,
            page_size=packed(cache.swa).page_size,
        )
        calls = []
        if self.compressor is not None and columns.compressor is not None:
            calls.append(self.compressor.compression(columns.compressor, cache.state, cache.compressed, step.rings))
        if self.index_compressor is not None and columns.index_compressor is not None:
            index = columns.index_compressor, cache.index_state, cache.index
            calls.append(self.index_compressor.compression(*index, step.rings))
        weights = columns.index_weights
        deferred_weights = None
        if isinstance(weights, Unmultiplied):
            values, matrix = x.require_values(), weights.weight
            if step.planned[Choice.INPUTS] <= MAX_TOKENS:
                weights = torch.empty(tokens, len(matrix), dtype=torch.float32, device=device)
                deferred_weights = IndexWeights(values, matrix, weights)
            else:
                weights = multiply_small(values, matrix, step)
        batch, workspace = step.plan.batch, step.workspace
        prepare_attention(
            latents,
            calls,
            batch,
            self._frequencies,
            workspace=workspace,
            index_weights=deferred_weights,
            planned_tokens=step.planned[Choice.INPUTS],
        )
        return Prepared(q_lora, weights)


class FusedSelection(nn.Module):
    """The lightning indexer: score the visible ratio-4 entries and select the best (specification §5).

    Returns their slots, int32 [T, index_topk], and their numbers, int32 [T]. Queries are scored in parts of as many as
    the pass has room for scores. Where ranks divide the tokens of a pass, each selects for those that it keeps. If no
    query can see more than index_topk entries, none is scored, and every rank takes all entries of all queries.
    """

    def __init__(self, context: Context, layer: LayerSpec):
        super().__init__()
        self._config, self._table, self._context = context.config, layer.rope, context

    def chooses(self, step: Step) -> bool:
        """Whether a query may see more entries than are chosen."""
        return step.scores.shape[1] > self._config.index_topk

    def scores(self, step: Step) -> bool:
        return self.chooses(step) or step.plan.batch.tokens < UNSCORED_MIN_TOKENS

    def forward(self, index_q: Tensor | None, weights: Tensor, step: Step, cache: LayerCache) -> tuple[Tensor, Tensor]:
        config, batch, keys = self._config, step.plan.batch, packed(cache.index)
        heads, dim, topk = config.index_n_heads, config.index_head_dim, config.index_topk
        tokens, factor, cos_sin = len(weights), dim**-0.5 * heads**-0.5, step.cos_sin[self._table]
        rows, chooses, ours = len(step.scores), self.chooses(step), self._context.tokens(tokens)
        own = ours.kept if chooses else slice(0, tokens)
        slots = weights.new_empty(own.stop - own.start, topk, dtype=batch.owners.dtype)
        lengths = weights.new_empty(len(slots), dtype=batch.owners.dtype)
        for first in range(own.start, own.stop, rows):
            part = slice(first, min(first + rows, own.stop))
            scores = step.scores[: part.stop - first]
            if chooses:
                assert index_q is not None
                query = (index_q[part].unflatten(1, (heads, dim)), weights[part], cos_sin[part], factor)
                index_scores(*query, *keys, batch, topk, scores, first=first)
            chosen = slice(first - own.start, part.stop - own.start)
            outputs = slots[chosen], lengths[chosen]
            select_entries(scores, batch, topk, *outputs, first=first, candidates=step.candidates)
        if chooses and ours.gather is not None:
            return ours.gather(slots), ours.gather(lengths)
        return slots, lengths


class FusedAttentionCore(nn.Module):
    """Query norm, RoPE and its inverse, sparse attention and quantisation in one launch (specification §3.1 to §3.3).

    Quantisation is part of the launch for the group sizes that ``fuses_quantization`` names, else a launch of its own.
    """

    def __init__(self, context: Context, layer: LayerSpec):
        super().__init__()
        config, parallel = context.config, context.parallel
        self._config, self._kind, self._table = config, layer.kind, layer.rope
        heads = parallel.heads(config)
        self._heads, self._groups = len(heads), len(parallel.o_groups(config))
        self.attn_sink = frozen(
            context.read(f"{layer.stem}.attn.attn_sink", rows=slice(heads.start, heads.stop)).float()
        )

    def forward(
        self, q: Tensor, step: Step, cache: LayerCache, entries: tuple[Tensor, Tensor] | None, form: Form
    ) -> Activation:
        config, plan, tokens = self._config, step.plan, q.shape[0]
        extra = None if self._kind is LayerKind.SWA else packed(cache.compressed)
        if self._kind is LayerKind.HCA:
            entries = plan.entry_slots, plan.entry_lengths
        slots, lengths = entries or (None, None)
        # Neighbouring tokens of a request see the same entries, but where each chooses from more than it may see.
        chooses = self._kind is LayerKind.CSA and step.scores.shape[1] > config.index_topk
        fused = Form.NVFP4 in form and fuses_quantization(self._heads, self._groups)
        width = self._heads // self._groups * config.head_dim
        rows = new_rows(tokens, width, q.device, groups=self._groups) if fused else None
        out = None
        if rows is None or Form.VALUES in form:
            out = torch.empty(tokens, self._heads, config.head_dim, dtype=q.dtype, device=q.device)
        sparse_attention(
            q.view(tokens, self._heads, config.head_dim),
            packed(cache.swa),
            plan.window_slots,
            self.attn_sink,
            config.head_dim**-0.5,
            extra,
            slots,
            window_lengths=plan.window_lengths,
            extra_lengths=lengths,
            cos_sin=step.cos_sin[self._table],
            query_eps=config.rms_norm_eps,
            semaphores=step.attention_semaphores,
            planned_queries=step.planned[Choice.ATTENTION],
            out=out,
            out_rows=rows,
            owners=None if plan.batch.is_decode or plan.is_block or chooses else plan.batch.owners,
            tokens_each=plan.batch.tokens_each,
            expected_extra=HCA_ENTRIES if self._kind is LayerKind.HCA and step.is_by_size else None,
        )
        values = None if out is None else out.view(tokens, self._groups, width)
        if rows is None and values is not None:
            return in_form(values, form)
        return Activation(values, rows)
