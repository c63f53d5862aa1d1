"""The decoder: blocks of attention and experts around four residual streams, and the final collapse."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from nvfp4_sgl.cache.layer import LayerCache
from nvfp4_sgl.cache.plan import BatchPlan
from nvfp4_sgl.model.attention import Attention
from nvfp4_sgl.model.context import ModelContext
from nvfp4_sgl.model.moe import MoE
from nvfp4_sgl.model.weights import WeightSource, frozen


class HyperConnection(nn.Module):
    """fp32 parameters of one mHC site: ``fn`` [rows, n * d], ``base`` [rows], ``scale`` [3 or 1]."""

    def __init__(self, reader: WeightSource, stem: str):
        super().__init__()
        self.fn = frozen(reader.read(f"{stem}_fn").float())
        self.base = frozen(reader.read(f"{stem}_base").float())
        self.scale = frozen(reader.read(f"{stem}_scale").float())


class Block(nn.Module):
    """Attention and experts of one layer, each inside an mHC site."""

    def __init__(self, context: ModelContext, layer: int):
        super().__init__()
        reader = context.source
        stem = f"layers.{layer}"
        self._config, self._ops, self._parallel = context.config, context.ops, context.parallel
        self.attn = Attention(context, layer)
        self.ffn = MoE(context, layer)
        self.attn_norm = frozen(reader.read(f"{stem}.attn_norm.weight"))
        self.ffn_norm = frozen(reader.read(f"{stem}.ffn_norm.weight"))
        self.hc_attn = HyperConnection(reader, f"{stem}.hc_attn")
        self.hc_ffn = HyperConnection(reader, f"{stem}.hc_ffn")

    def _enter(self, streams: Tensor, site: HyperConnection, norm: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        config = self._config
        collapsed, post, comb = self._ops.hyper_connection_pre(
            streams,
            site.fn,
            site.base,
            site.scale,
            iterations=config.hc_sinkhorn_iters,
            hc_eps=config.hc_eps,
            norm_eps=config.rms_norm_eps,
        )
        return self._ops.rms_norm(collapsed, norm, config.rms_norm_eps), post, comb

    def forward(self, streams: Tensor, token_ids: Tensor, plan: BatchPlan, cache: LayerCache) -> Tensor:
        """Streams [T, n, d] after this layer, from those before it."""
        x, post, comb = self._enter(streams, self.hc_attn, self.attn_norm)
        output = self._parallel.all_reduce(self.attn(x, plan, cache)).to(streams.dtype)
        streams = self._ops.hyper_connection_post(output, streams, post, comb)
        x, post, comb = self._enter(streams, self.hc_ffn, self.ffn_norm)
        output = self._parallel.all_reduce(self.ffn(x, token_ids)).to(streams.dtype)
        return self._ops.hyper_connection_post(output, streams, post, comb)


class Decoder(nn.Module):
    """All layers between the embedding and the LM head.

    Construction loads the weights: every tensor but ``embed`` and ``head`` is read from ``context.source``.
    """

    def __init__(self, context: ModelContext):
        super().__init__()
        context.parallel.check(context.config)
        self._config, self._ops = context.config, context.ops
        self.layers = nn.ModuleList(Block(context, layer) for layer in range(context.config.num_hidden_layers))
        self.hc_head = HyperConnection(context.source, "hc_head")
        self.norm = frozen(context.source.read("norm.weight"))

    def embed(self, token_ids: Tensor, table: Tensor) -> Tensor:
        """Residual streams [T, n, d] of ``token_ids``, int [T], from the whole embedding table [vocabulary, d]."""
        return self.expand(table[token_ids])

    def expand(self, embedded: Tensor) -> Tensor:
        """Residual streams [T, n, d] of embeddings [T, d], in the model dtype."""
        return self._ops.expand_streams(embedded, self._config.hc_mult)

    def forward(self, streams: Tensor, token_ids: Tensor, plan: BatchPlan, caches: Sequence[LayerCache]) -> Tensor:
        """Hidden states [T, d] for the LM head.

        Args:
            streams: [T, n, d] from :meth:`embed` or :meth:`expand`.
            token_ids: int [T]; the first layers route by them.
            plan: the batch's slots.
            caches: one a layer.
        """
        config, ops = self._config, self._ops
        for layer, cache in zip(self.layers, caches, strict=True):
            streams = layer(streams, token_ids, plan, cache)
        head = self.hc_head
        hidden = ops.hyper_connection_head(
            streams, head.fn, head.base, head.scale, hc_eps=config.hc_eps, norm_eps=config.rms_norm_eps
        )
        return ops.rms_norm(hidden, self.norm, config.rms_norm_eps)
