"""The attention backend: hands SGLang's batches to the target's planner, and SGLang's pools to the model.

Registered under the name ``nvfp4_sgl``, for every target. The model does the attention itself; SGLang asks a backend
only to prepare each batch's metadata.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nvfp4_sgl.cache.layer import LayerCache
from nvfp4_sgl.cache.layout import PAGE_TOKENS
from nvfp4_sgl.cache.rows import RowStore, row_store
from nvfp4_sgl.config import ARCHITECTURE, ModelConfig
from nvfp4_sgl.errors import UnsupportedError
from nvfp4_sgl.formats import index_entry, kv_entry
from nvfp4_sgl.model.contract import Context, PassKind, PassRequest, Slots
from nvfp4_sgl.prompt_graphs import PromptGraph, PromptGraphs
from nvfp4_sgl.serving import stages
from nvfp4_sgl.serving.flags.kernels import BACKEND
from nvfp4_sgl.serving.model import require_own_model
from nvfp4_sgl.serving.rings import rings
from nvfp4_sgl.serving.sglang import pools, replays, settings
from nvfp4_sgl.serving.sglang.ledger import find


class Nvfp4AttentionBackend(find("AttentionBackend")):  # type: ignore[misc]
    """Plans every forward pass of our DeepSeek-V4.

    Attributes:
        plan: the target's step of the current batch; ``None`` for an idle one.
        caches: one :class:`LayerCache` a layer, views of SGLang's pools made once.
        prompts: graphs of prompts, if there are some. graph: the one that the current batch is loaded into.
    """

    prompts: PromptGraphs | None = None
    graph: PromptGraph | None = None

    needs_cpu_seq_lens = False
    """Lengths on the host are read in prefill passes alone, for which SGLang always has them. In rounds of drafts it
    would wait for the device to get them."""

    def __init__(self, runner: Any):
        super().__init__()
        self.require_model(runner.model)
        if runner.page_size != PAGE_TOKENS:
            raise UnsupportedError(
                f"--page-size {runner.page_size}: DeepSeek-V4's pools need {PAGE_TOKENS}; leave it out"
            )
        self.device = runner.device
        self.token_to_kv_pool = runner.token_to_kv_pool
        self.req_to_token_pool = runner.req_to_token_pool
        self.page_size = runner.page_size
        model = runner.model
        self.caches = self.layer_caches(model)
        self.plan: Any = None
        self._verify_mask = pools.verify_mask(self.req_to_token_pool, runner, max(settings.round_tokens(), 1))
        slots = Slots(
            self.req_to_token_pool.req_to_token,
            pools.full_to_swa_mapping(self.token_to_kv_pool),
            requests=self.req_to_token_pool.size,
            longest=int(runner.model_config.context_len),
            rings=rings(),
            drafted=max(settings.round_tokens(), 1),
        )
        self.planner = model.choice.boundaries.plan(self.planned_context(model), slots, self.caches)
        self.warm_up(model)

    def require_model(self, model: Any) -> None:
        """:class:`UnsupportedError` unless ``model`` is the one that this backend plans for."""
        require_own_model(model)

    def planned_context(self, model: Any) -> Context:
        """The context that the planner goes by: ``model``'s, whose layers say what a pass needs."""
        context: Context = model.context
        return context

    def layer_caches(self, model: Any) -> list[LayerCache]:
        """One :class:`LayerCache` a layer of ``model``."""
        config: ModelConfig = model.model_config
        return [layer_cache(self.token_to_kv_pool, config, layer) for layer in model.decoder.range]

    def warm_up(self, model: Any) -> None:
        """Compile and run what requests can ask for."""
        with stages.stage("warm-up"):
            self.planner.warm_up(model.decoder, model.embed.weight, settings.largest_prefill())

    @property
    def verify_mask(self) -> Any:
        """SGLang's mask of the rows of a round, which nothing reads; its default grows with the context."""
        return self._verify_mask

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Length of the requests that a batch is padded with."""
        return 1

    def request(self, forward_batch: Any) -> PassRequest:
        """SGLang's forward batch as the planner takes it."""
        return pass_request(forward_batch)

    def support_triton(self) -> bool:
        return False

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Plan an eager pass, or load a prompt into a graph, which plans it itself."""
        self.plan = self.graph = None
        if forward_batch.forward_mode.is_idle():
            return
        request = self.request(forward_batch)
        if self.prompts is not None and request.kind is PassKind.EXTEND:
            self.graph = self.prompts.find(request)
        if self.graph is None:
            self.plan = self.planner.plan(request)
        else:
            self.graph.load(request)
            self.plan = self.graph.step

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Allocate what graphs of up to ``max_num_tokens`` tokens share."""
        self.planner.reserve(max_num_tokens)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Before a capture: the graph's own room. Before a replay: nothing, since the graph plans the pass itself."""
        if in_capture:
            self.plan, self.graph = self.planner.capture(self.request(forward_batch)), None

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """Record the plan of the graph's tokens, from the runner's buffers.

        These kernels copy what the layers need of the scheduler's tables of slots, and none reads them afterwards. So
        SGLang's default holds (``shared_read_ends``): the scheduler prepares the next step while a graph runs. A
        request that has just ended still runs one step then, in the pages that were its own when the step began;
        the caller writes to them afterwards.
        """
        self.planner.fill(self.plan, self.request(forward_batch))


def prepare_replay(original: Callable[..., None], runner: Any, forward_batch: Any, **rest: Any) -> None:
    """Hook around what SGLang prepares for a backend before a replay: nothing for ours, whose graphs plan the pass.

    SGLang would slice each of the graph's buffers for it, in every step.
    """
    backend = type(replays.planned_alone(runner))
    if getattr(backend, "init_forward_metadata_out_graph", None) is not PLANS_IN_GRAPH:
        original(runner, forward_batch, **rest)


PLANS_IN_GRAPH = Nvfp4AttentionBackend.init_forward_metadata_out_graph
"""The preparation of backends whose graphs plan the pass: before a replay it does nothing."""
HOOKS: dict[str, Callable[..., Any]] = {"prepare_replay": prepare_replay}
"""What is installed into the scheduler of our model, by name in :data:`nvfp4_sgl.serving.sglang.hooked.HOOKS`."""


def require_own_backend(backend: Any) -> None:
    """:class:`UnsupportedError` unless our model runs on our backend."""
    if not isinstance(backend, Nvfp4AttentionBackend):
        raise UnsupportedError(
            f"architecture {ARCHITECTURE}: expected the attention backend '{BACKEND}', found {type(backend).__name__};"
            " leave the --attention-backend flags out"
        )


KINDS = {
    "EXTEND": PassKind.EXTEND,
    "DECODE": PassKind.DECODE,
    "TARGET_VERIFY": PassKind.VERIFY,
    "DRAFT_EXTEND_V2": PassKind.VERIFY,
}
"""Kinds of passes by SGLang's forward mode; of an idle one nothing is asked. Others come with flags that are refused:
mixed chunks, disaggregation and diffusion."""


def pass_request(forward_batch: Any) -> PassRequest:
    """SGLang's forward batch as the planners take it.

    Raises:
        UnsupportedError: its forward mode is none of :data:`KINDS`.
    """
    mode, ends, each = forward_batch.forward_mode.name, forward_batch.seq_lens, 1
    kind = KINDS.get(mode)
    if kind is None:
        raise UnsupportedError(
            f"forward mode {mode}: expected one of {', '.join(KINDS)}; leave out the flag that asks for such passes"
        )
    if kind is PassKind.EXTEND:
        added, longest = forward_batch.extend_seq_lens, int(forward_batch.seq_lens_cpu.max())
        return PassRequest(forward_batch.positions, forward_batch.req_pool_indices, ends, kind, added, longest=longest)
    if mode == "TARGET_VERIFY":  # lengths are those in front of the pass
        each = forward_batch.spec_info.draft_token_num
        ends = ends + each
    elif mode == "DRAFT_EXTEND_V2":
        each = forward_batch.spec_info.num_tokens_per_req
    return PassRequest(forward_batch.positions, forward_batch.req_pool_indices, ends, kind, tokens_each=each)


def layer_cache(pool: Any, config: ModelConfig, index: int) -> LayerCache:
    """Row stores over one layer's buffers of SGLang's pool, exact or packed by the buffers' dtype."""
    layer, swa = config.layer(index), window_rows(pool, config, index)
    if not layer.compresses:
        return LayerCache(swa)
    page, ring = PAGE_TOKENS // layer.ratio, rings()[layer.ratio]
    compressed = row_store(pools.compressed_buffer(pool, index), page, config.head_dim, kv_entry.FORMAT)
    state = pools.compress_state(pool, index, ring=ring)
    if not layer.selects:
        return LayerCache(swa, compressed, state=state)
    keys = row_store(pools.index_buffer(pool, index), page, config.index_head_dim, index_entry.FORMAT)
    return LayerCache(swa, compressed, keys, state, pools.index_compress_state(pool, index, ring=ring))


def window_rows(pool: Any, config: ModelConfig, layer: int) -> RowStore:
    """A layer's rows of the sliding window in SGLang's pool."""
    return row_store(pools.swa_buffer(pool, layer), PAGE_TOKENS, config.head_dim, kv_entry.FORMAT)
