"""The model class that SGLang serves under the name ``DeepseekV4ForCausalLM``.

A thin shell: SGLang's vocabulary-parallel embedding, LM head and logits processor around our decoder, and our
loader behind SGLang's ``load_weights``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from nvfp4_sgl import pushed_sums
from nvfp4_sgl.build import Serving
from nvfp4_sgl.cache.layer import LayerCache
from nvfp4_sgl.checkpoint.reader import CheckpointReader
from nvfp4_sgl.checkpoint.verified import Verified
from nvfp4_sgl.config import ARCHITECTURE, ModelConfig
from nvfp4_sgl.errors import ConfigError, UnsupportedError
from nvfp4_sgl.memory.setting import Setting
from nvfp4_sgl.model.capture import captured_means
from nvfp4_sgl.model.contract import Context
from nvfp4_sgl.model.decoder import Decoder
from nvfp4_sgl.model.dspark import DsparkDraft
from nvfp4_sgl.model.layer import Walk
from nvfp4_sgl.model.replace import replace_weights
from nvfp4_sgl.serving import stages
from nvfp4_sgl.serving.compiler import start_compiling
from nvfp4_sgl.serving.loading import LoadedOnce
from nvfp4_sgl.serving.memory import forecast_here
from nvfp4_sgl.serving.sglang import parallel, settings
from nvfp4_sgl.serving.sglang.ledger import find
from nvfp4_sgl.serving.trace import check_trace, recorder
from nvfp4_sgl.targets.choose import Choice
from nvfp4_sgl.targets.fused.exchange import exchange_of, shared_inboxes
from nvfp4_sgl.tracing.asked import is_traced
from nvfp4_sgl.tracing.record import Recorder
from nvfp4_sgl.weights.layout import held_elsewhere
from nvfp4_sgl.weights.parallel import Collective, Exchange, SequenceParallel, TensorParallel


class DeepseekV4ForCausalLM(LoadedOnce):
    """DeepSeek-V4 with packed NVFP4 weights on SGLang's runtime."""

    kind = "model"

    def __init__(self, config: Any, quant_config: Any = None, prefix: str = ""):
        with stages.stage("config") as words:
            super().__init__(config)
            words.append(f"{self.verified.inventory.directory} verified")
            words.append(f"{len(self.verified.inventory.entries):,} tensors")
            summary = self.verified.summary
            if summary.skipped and settings.draft_algorithm() is None:
                words.append(f"{summary.skipped} of them, mtp.*, left out ({summary.draft})")
        self.activation_mode = self.choice.mode
        check_trace()
        longest = settings.resolved("context_length") or self.model_config.max_position_embeddings
        self.memory = forecast_here(self.verified, self.choice, int(longest), pushed_tokens(self.choice.target))
        if parallel.tp_rank() == 0:
            setting = compiled_for(self.memory.setting, self.choice, self.uniform_experts)
            start_compiling(self.verified, self.choice.target, setting)
        self.embed = find("VocabParallelEmbedding")(self.model_config.vocab_size, self.model_config.hidden_size)
        self.head = find("ParallelLMHead")(self.model_config.vocab_size, self.model_config.hidden_size)
        self.logits_processor = make_logits_processor(config)
        self.start_layer, self.end_layer = 0, self.model_config.num_hidden_layers
        self.feeds_draft = settings.draft_algorithm() is not None
        self.captured: tuple[int, ...] = ()
        self.fed: tuple[DsparkDraft, Sequence[LayerCache]] | None = None
        self.decoder: Decoder | None = None
        self.recorder: Recorder | None = None

    def get_input_embeddings(self) -> nn.Module:
        return self.embed

    @property
    def is_loaded(self) -> bool:
        return self.decoder is not None

    @property
    def context(self) -> Context:
        """The context that the decoder was built from."""
        assert self.decoder is not None, "load_weights has not run"
        return self.decoder.context

    @property
    def lm_head(self) -> nn.Module:
        """SGLang's name of :attr:`head`."""
        return self.head

    def set_dspark_layers_to_capture(self, layers: Sequence[int]) -> None:
        """Capture the mean streams behind ``layers`` for a DSpark draft; SGLang calls this before :meth:`feed`."""
        self.captured = tuple(layers)

    def feed(self, draft: DsparkDraft, caches: Sequence[LayerCache]) -> None:
        """Write the context of ``draft`` to ``caches``, of its stages, in every pass from now on."""
        self.fed = (draft, caches)

    def get_embed_and_head(self) -> tuple[nn.Module, nn.Module]:
        """The modules that a draft shares, which :class:`~.drafts.model.MtpForCausalLM` takes."""
        return self.embed, self.head

    @torch.no_grad()
    def replace_weights(self, found: Verified) -> None:
        """Load ``found``, which differs from what is served in values alone, into the tensors that are there.

        Raises:
            CheckpointError: something could not be read; what came before it is replaced, so nothing must run any more.
        """
        assert self.decoder is not None, "load_weights has not run"
        reader = found.reader(self.embed.weight.device, progress)
        self._read_vocabulary(reader)
        replace_weights(self.decoder, replace(self.decoder.context, source=reader))
        reader.finish(held_elsewhere(self.model_config, self.decoder.context.parallel))
        self.verified = found

    def _load(self) -> None:
        with stages.stage("weights") as words:
            self._read_weights()
            words.append(self.verified.describe())
            words.append(f"{self.verified.summary.nbytes / 1e9:.2f} GB stored")

    def _read_weights(self) -> None:
        device = self.embed.weight.device
        reader = self.verified.reader(device, progress)
        self._read_vocabulary(reader)
        context = rank_context(reader, self.model_config, self.choice, self.embed.weight, self.uniform_experts)
        self.decoder = Decoder(context)
        self.recorder = recorder(self.decoder, self.choice.target, self.activation_mode.value)
        reader.finish(held_elsewhere(self.model_config, context.parallel))

    def _read_vocabulary(self, reader: CheckpointReader) -> None:
        """Copy this rank's rows of embedding and LM head to where they belong."""
        for module, name in ((self.embed, "embed.weight"), (self.head, "head.weight")):
            module.weight.weight_loader(module.weight, reader.read(name))

    @torch.no_grad()
    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        forward_batch: Any,
        input_embeds: Tensor | None = None,
    ) -> Any:
        """SGLang's entry: logits of the batch that the backend has planned."""
        assert self.decoder is not None, "load_weights has not run"
        backend = planned_backend()
        input_ids.clamp_(min=0)  # a request that has failed (finite_logits.FAILED) may be in its next pass already
        streams = None
        if backend.plan is None:
            hidden = self.embed(input_ids)
        elif backend.graph is not None:
            assert input_embeds is None, "requests with embeddings are refused"
            hidden, streams = backend.graph.replay(input_ids)
        else:
            embedded = self._streams(input_ids, input_embeds)
            with self._recorded(input_ids, positions):
                hidden, streams = self.walk(embedded, input_ids, backend.plan, backend.caches)
        return self.logits_processor(
            input_ids,
            hidden,
            self.head,
            forward_batch,
            hidden_states_before_norm=streams,
        )

    def body(self, input_ids: Tensor, step: object, caches: Sequence[LayerCache]) -> tuple[Tensor, Tensor | None]:
        """:meth:`walk` from token ids; on a GPU kernels only."""
        return self.walk(self._streams(input_ids, None), input_ids, step, caches)

    def walk(
        self, embedded: Tensor, input_ids: Tensor, step: object, caches: Sequence[LayerCache]
    ) -> tuple[Tensor, Tensor | None]:
        """(hidden states [T, d], streams [T, n * d] if an MTP draft reads them) of the pass of ``step``.

        The context of a DSpark draft is written.

        Args:
            embedded: [T, n, d], which may be overwritten.
        """
        assert self.decoder is not None, "load_weights has not run"
        walk = self.decoder.walk(embedded, input_ids, step, caches)
        if self.captured:
            self._feed_context(walk, step)
        else:
            walk.finish()
        reads_streams = self.feeds_draft and not self.captured
        return walk.x.require_values(), walk.all_streams().flatten(1) if reads_streams else None

    def _feed_context(self, walk: Walk, plan: object) -> None:
        """Compute the pass of ``walk``, planned as ``plan``, and write what the draft keeps of its tokens."""
        assert self.fed is not None, "the draft's backend comes before the first pass"
        draft, caches = self.fed
        draft.inject(captured_means(walk, self.captured, draft.parts.capture), plan, caches)

    def _recorded(self, token_ids: Tensor, positions: Tensor) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext() if self.recorder is None else self.recorder.recording(token_ids, positions)

    def _streams(self, input_ids: Tensor, input_embeds: Tensor | None) -> Tensor:
        assert self.decoder is not None
        if input_embeds is None and parallel.tp_size() == 1:
            return self.decoder.embed(input_ids, self.embed.weight)
        return self.decoder.expand(self.embed(input_ids) if input_embeds is None else input_embeds)


def make_logits_processor(config: Any) -> Any:
    """SGLang's module from hidden states to logits, in fp32.

    DeepSeek's are an fp32 GEMM of the bf16 head (specification §7); SGLang's default rounds them to bf16.
    """
    config.enable_lm_head_fp32 = True
    return find("LogitsProcessor")(config)


def planned_backend() -> Any:
    """The attention backend that has planned the pass which SGLang runs."""
    return find("get_attn_backend")()


def rank_context(
    reader: CheckpointReader, config: ModelConfig, choice: Choice, like: Tensor, uniform_experts: bool
) -> Context:
    """The context of this rank's modules, on the device and in the dtype of ``like``."""
    ranks = SequenceParallel(reduce_scatter, parallel.tp_all_gather)
    tokens = pushed_tokens(choice.target)
    exchange = shared_exchange(tokens, config.hidden_size, like.device) if tokens else None
    share = TensorParallel(parallel.tp_rank(), parallel.tp_size(), all_reduce, ranks, exchange)
    return Context(reader, config, choice.boundaries, like.device, like.dtype, choice.mode, share, uniform_experts)


def compiled_for(sizes: Setting, choice: Choice, uniform_experts: bool) -> Serving:
    """The server whose kernels are compiled while its weights are loaded.

    Args:
        sizes: ranks, requests and tokens, as the forecast of memory takes them.
    """
    return Serving(
        sizes.ranks,
        sizes.context,
        sizes.requests,
        sizes.chunk,
        uniform_experts,
        choice.mode,
        sizes.round_tokens,
        sizes.pushed_tokens > 0,
    )


def pushes_sums(target: str) -> bool:
    """Whether this server's ranks push parts of short passes' sums; by SGLang's all-reduce they are formed otherwise.

    Raises:
        ConfigError: the environment insists on it, and SGLang has found that a GPU cannot reach another one's memory,
            or takes its older all-reduce.
    """
    if not pushed_sums.planned(target=target, ranks=parallel.tp_size(), traces=is_traced()):
        return False
    if pushed_sums.asked() and not parallel.reaches_peers():
        raise ConfigError(
            f"{pushed_sums.SWITCH}=1: expected GPUs that reach each other's memory by NVLink, found that SGLang's own"
            f" all-reduce is off or its older one; unset {pushed_sums.SWITCH}, or set it to 0"
        )
    return parallel.reaches_peers()


def pushed_tokens(target: str) -> int:
    """Tokens of the largest pass whose parts of sums this server's ranks push; 0 if they push none.

    Raises:
        ConfigError: as :func:`pushes_sums`.
    """
    return pushed_sums.capacity(parallel.tp_size()) if pushes_sums(target) else 0


def shared_exchange(tokens: int, width: int, device: torch.device) -> Exchange:
    """Room for pushed parts of passes of up to ``tokens`` tokens in the memory of all ranks, which all call this.

    Raises:
        ConfigError: PyTorch cannot share memory between the ranks' GPUs.
    """
    try:
        inboxes = shared_inboxes(parallel.tp_cpu_group(), tokens, width, device)
    except RuntimeError as error:
        raise ConfigError(
            f"{pushed_sums.SWITCH}: expected memory that ranks share, found that PyTorch cannot share it: {error};"
            f" set {pushed_sums.SWITCH}=0, which sums by SGLang's all-reduce"
        ) from error
    return exchange_of(parallel.tp_rank(), inboxes)


def require_own_model(model: Any) -> None:
    """:class:`UnsupportedError` unless ``model`` is our DeepSeek-V4: no fallback to SGLang's own class."""
    if not isinstance(model, DeepseekV4ForCausalLM):
        raise UnsupportedError(
            f"architecture {ARCHITECTURE}: expected the class of {DeepseekV4ForCausalLM.__module__},"
            f" found {type(model).__module__}.{type(model).__name__}; another plugin or"
            " SGLANG_EXTERNAL_MODEL_PACKAGE replaced it: remove that, or set NVFP4_SGL_DISABLE=1"
        )


def progress(line: str) -> None:
    """Log the progress of loading."""
    stages.say("weights", line)


def all_reduce(collective: Collective, part: Tensor) -> Tensor:
    """SGLang's tensor-parallel sum, the same at every place."""
    return parallel.tp_all_reduce(part)


def reduce_scatter(collective: Collective, part: Tensor) -> Tensor:
    """The same sum, of which this rank gets its rows."""
    return parallel.tp_reduce_scatter(part)
