"""The decoder on a GPU: mHC sites that span from one sublayer's output to the next one's input."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from nvfp4_sgl.cache.layer import LayerCache
from nvfp4_sgl.errors import UnsupportedError
from nvfp4_sgl.gpu.attention import Attention
from nvfp4_sgl.gpu.context import GpuContext
from nvfp4_sgl.gpu.moe import MoE
from nvfp4_sgl.gpu.step import Frequencies, Scratch, Step
from nvfp4_sgl.model.weights import frozen
from nvfp4_sgl.ops.linear import ActivationMode
from nvfp4_sgl.triton_kernels.hyper_connection.site import (
    Site,
    SiteState,
    hyper_connection_next,
    hyper_connection_pre,
    split_fn,
)
from nvfp4_sgl.triton_kernels.hyper_connection.streams import embed_streams, expand_streams


class HyperConnection(nn.Module):
    """Parameters of one mHC site, and the norm after it: fp32, ``fn`` as three bf16; spec section 2."""

    def __init__(self, context: GpuContext, stem: str, norm: str, *, iterations: int):
        super().__init__()

        def read(name: str) -> Tensor:
            return context.source.read(name).to(context.device).float()

        self.fn = frozen(split_fn(read(f"{stem}_fn")))
        self.base, self.scale, self.norm = (frozen(read(name)) for name in (f"{stem}_base", f"{stem}_scale", norm))
        config = context.config
        self.site = Site(
            self.fn.data,
            self.base.data,
            self.scale.data,
            config.hc_eps,
            config.rms_norm_eps,
            self.norm.data,
            iterations,
        )


class Block(nn.Module):
    """Attention and experts of one layer, and the sites in front of them."""

    def __init__(self, context: GpuContext, layer: int, frequencies: Frequencies, scratch: Scratch):
        super().__init__()
        stem, iterations = f"layers.{layer}", context.config.hc_sinkhorn_iters
        self.attn = Attention(context, layer, frequencies)
        self.ffn = MoE(context, layer, scratch)
        self.hc_attn = HyperConnection(context, f"{stem}.hc_attn", f"{stem}.attn_norm.weight", iterations=iterations)
        self.hc_ffn = HyperConnection(context, f"{stem}.hc_ffn", f"{stem}.ffn_norm.weight", iterations=iterations)


class GpuDecoder(nn.Module):
    """All layers between the embedding and the LM head.

    Construction loads the weights: every tensor but ``embed`` and ``head`` is read from ``context.source``.
    """

    def __init__(self, context: GpuContext):
        super().__init__()
        if context.mode is not ActivationMode.W4A16:
            raise UnsupportedError(
                f"activation_mode {context.mode.value}: on {context.device} products take bf16 activations;"
                f" use {ActivationMode.W4A16.value}, or a GPU with NVFP4 tensor cores"
            )
        context.parallel.check(context.config)
        self._config, self._parallel = context.config, context.parallel
        self.frequencies = Frequencies.of(context.config, context.device)
        self.scratch = Scratch(context.device)
        layers = range(context.config.num_hidden_layers)
        blocks = [Block(context, layer, self.frequencies, self.scratch) for layer in layers]
        self.layers = nn.ModuleList(blocks)
        self.hc_head = HyperConnection(context, "hc_head", "norm.weight", iterations=0)
        sites = [site for block in blocks for site in (block.hc_attn, block.hc_ffn)] + [self.hc_head]
        self._blocks, self._sites = blocks, [site.site for site in sites]

    def embed(self, token_ids: Tensor, table: Tensor) -> Tensor:
        """Residual streams [T, n, d] of ``token_ids``, int [T], from the whole embedding table [vocabulary, d]."""
        return embed_streams(token_ids, table, self._config.hc_mult)

    def expand(self, embedded: Tensor) -> Tensor:
        """Residual streams [T, n, d] of embeddings [T, d]."""
        return expand_streams(embedded, self._config.hc_mult)

    def forward(self, streams: Tensor, token_ids: Tensor, step: Step, caches: Sequence[LayerCache]) -> Tensor:
        """Hidden states bf16 [T, d] for the LM head.

        Args:
            streams: bf16 [T, n, d] from :meth:`embed` or :meth:`expand`; overwritten.
            token_ids: int [T]; the first layers route by them.
            step: the prepared pass.
            caches: one a layer.
        """
        all_reduce = self._parallel.all_reduce
        tokens, _, d = streams.shape
        state = SiteState.allocate(tokens, d, streams.device, counters=step.site_counters)
        hyper_connection_pre(self._sites[0], streams, state)
        following = iter(self._sites[1:])
        for block, cache in zip(self._blocks, caches, strict=True):
            output = all_reduce(block.attn(state.x, step, cache))
            hyper_connection_next(next(following), output, streams, state)
            output = all_reduce(block.ffn(state.x, token_ids))
            hyper_connection_next(next(following), output, streams, state)
        return state.x
