"""The boundaries of the decoder: what the shared model asks of a target, in types.

The model (``attention``, ``moe``, ``decoder``) says which matrices, norms, tables and caches meet where. A target says
how each boundary is computed: on the CPU as a composition of the references in :mod:`nvfp4_sgl.ops`, on a GPU as fused
kernels. The boundaries are those that a GPU fuses at:

==================  ===================================================================================================
plan                where the tokens of a pass stand, which slots they write and see (:class:`Planner`)
embed               token ids to residual streams (:class:`Embedding`)
site                post of one sublayer, mHC pre and RMSNorm of the next (:class:`Site`)
project             GEMMs that read one activation (:class:`InputProjection`, :class:`Projection`,
                    :class:`GroupedProjection`)
prepare_attention   latents, cache rows, compressed entries (:class:`AttentionInputs`)
select              index scores and the entries chosen by them (:class:`Selection`)
attend              queries to attention output (:class:`AttentionCore`)
route               experts and weights of each token (:class:`Router`)
experts             the experts' GEMMs, SwiGLU and their weighted sum (:class:`Experts`)
==================  ===================================================================================================

A producer of an activation is told what its consumer reads (:class:`Form`), so that it quantises on the way out.
The step of a pass, and what passes from ``route`` to ``experts``, from ``select`` to ``attend`` and between sites, are
the target's own: type parameters, one each for all boundaries of a target. To the model they are objects.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from nvfp4_sgl.cache.layer import LayerCache
from nvfp4_sgl.cache.layout import STATE_RING, Rings
from nvfp4_sgl.config import LayerSpec, ModelConfig
from nvfp4_sgl.formats.rows import Rows
from nvfp4_sgl.model.policy import Choice, Policy
from nvfp4_sgl.model.tokens import Gather, Tokens, tokens_of
from nvfp4_sgl.ops.modes import ActivationMode
from nvfp4_sgl.weights.gemms import DraftMatrices
from nvfp4_sgl.weights.layout import ExpertMatrices
from nvfp4_sgl.weights.parallel import Slot, TensorParallel
from nvfp4_sgl.weights.source import Shard, WeightSource

CPU = torch.device("cpu")

StepT = TypeVar("StepT")
"""What all layers of a pass share, from ``plan``."""
MixT = TypeVar("MixT")
"""What a site leaves for the next one."""
EntriesT = TypeVar("EntriesT")
"""What ``select`` chooses for ``attend``."""
RoutesT = TypeVar("RoutesT")
"""What ``route`` chooses for ``experts``."""
ExpertsT = TypeVar("ExpertsT", bound="Experts[Any, Any]")
StepIn = TypeVar("StepIn", contravariant=True)
EntriesIn = TypeVar("EntriesIn", contravariant=True)
EntriesOut = TypeVar("EntriesOut", covariant=True)
RoutesIn = TypeVar("RoutesIn", contravariant=True)
RoutesOut = TypeVar("RoutesOut", covariant=True)


class Form(enum.Flag):
    """The form of an activation that its consumers read."""

    VALUES = enum.auto()
    """Values in the model dtype."""
    NVFP4 = enum.auto()
    """Codes and block scales, in the layout of the consumer's token tile."""


@dataclass(frozen=True)
class Activation:
    """An activation in the forms that its consumers asked for.

    Attributes:
        values: [T, K] or [T, G, K] in the model dtype.
        rows: the same in NVFP4.
    """

    values: Tensor | None = None
    rows: Rows | None = None

    def require_values(self) -> Tensor:
        assert self.values is not None, "the producer of this activation was not asked for Form.VALUES"
        return self.values

    def require_rows(self) -> Rows:
        assert self.rows is not None, "the producer of this activation was not asked for Form.NVFP4"
        return self.rows


class PassKind(enum.Enum):
    """The number of tokens that each request of a pass adds, and what these see."""

    EXTEND = enum.auto()
    """Any number each, which the scheduler tells."""
    DECODE = enum.auto()
    """One each."""
    VERIFY = enum.auto()
    """``tokens_each`` each: a token and the draft behind it."""
    BLOCK = enum.auto()
    """``tokens_each`` each, or as ``added`` says, a draft's block: each token sees the window in front of the block
    and all of it."""

    @property
    def is_by_size(self) -> bool:
        """Whether all sizes follow from the numbers of tokens and requests, so that a graph can be captured."""
        return self is not PassKind.EXTEND


@dataclass(frozen=True)
class PassRequest:
    """A pass as the scheduler describes it.

    Tokens are packed request after request; request b adds tokens up to length ``ends[b]``.

    Attributes:
        positions: int64 [T]. requests: int64 [B], request slots. ends: int64 [B], lengths after the pass.
        kind: of the pass.
        added: int32 [B], new tokens of each request; ``None`` where each adds ``tokens_each``.
        tokens_each: tokens that each request adds in a pass that :attr:`PassKind.is_by_size`.
        longest: length of the longest sequence of this pass as the host knows it; ``None`` leaves it open.
    """

    positions: Tensor
    requests: Tensor
    ends: Tensor
    kind: PassKind = PassKind.DECODE
    added: Tensor | None = None
    tokens_each: int = 1
    longest: int | None = None

    def __post_init__(self) -> None:
        if self.kind is not PassKind.BLOCK:
            assert self.kind.is_by_size is (self.added is None), f"{self.kind}: added is {self.added}"
        assert self.tokens_each == 1 or (self.kind in (PassKind.VERIFY, PassKind.BLOCK) and self.added is None)


@dataclass(frozen=True)
class Slots:
    """SGLang's tables of slots.

    Attributes:
        table: int [request slots, columns], the full slot of each position of a request.
        full_to_swa: int64, window slot of a full slot.
        requests: of the largest decode pass. longest: tokens of the longest sequence that may come.
        rings: rows of the compressors' state rings.
        drafted: most tokens that a request adds in a pass that verifies: 1 in a run without drafts.
    """

    table: Tensor
    full_to_swa: Tensor
    requests: int
    longest: int
    rings: Rings = field(default_factory=lambda: STATE_RING)
    drafted: int = 1


class Planner(Protocol[StepT]):
    """Plans passes over SGLang's slots; one a decoder."""

    def plan(self, request: PassRequest) -> StepT:
        """Plan an eager pass; returns its step."""

    def reserve(self, tokens: int) -> None:
        """Allocate what the captured graphs of up to ``tokens`` tokens share."""

    def capture(self, request: PassRequest) -> StepT:
        """Allocate the step of a graph that is about to be captured; its memory lives as long as the planner."""

    def fill(self, step: StepT, request: PassRequest) -> None:
        """Fill ``step`` from the request's tensors inside the capture; launches kernels only."""

    def warm_up(self, decoder: Any, table: Tensor, tokens: int) -> None:
        """Compile and run everything that a request can need.

        Args:
            decoder: the :class:`~nvfp4_sgl.model.decoder.Decoder` that runs the steps.
            table: [vocabulary, d], the embedding, or this rank's part of it.
            tokens: of the largest prefill pass.
        """


class Embedding(Protocol):
    """Token ids, or embeddings, to residual streams."""

    def embed(self, token_ids: Tensor, table: Tensor) -> Tensor:
        """Streams [T, n, d] of int ids [T], from the whole table [vocabulary, d]."""

    def expand(self, embedded: Tensor) -> Tensor:
        """Streams [T, n, d] of embeddings [T, d]."""


class Site(Protocol[StepIn, MixT]):
    """One mHC site with the RMSNorm behind it, or the final collapse (specification §2).

    Streams [own, n, d], outputs [own, d] and mixes are those of the tokens that the rank keeps (:mod:`.tokens`). Where
    it does not keep them all, ``gather`` makes results those of all T tokens: a sublayer's input [T, d], the streams
    [T, n, d] that are left.
    """

    def enter(self, streams: Tensor, step: StepIn, *, gather: Gather | None = None) -> tuple[Activation, MixT]:
        """(the sublayer's input, what mixes its output back) at the first site of a range of layers."""

    def advance(
        self, output: Tensor | Slot, streams: Tensor, mix: MixT, step: StepIn, *, gather: Gather | None = None
    ) -> tuple[Activation, Tensor, MixT]:
        """Mix a sublayer's output into the streams, then enter this site: (input, streams, mix).

        A target whose sublayers send adds what ranks have sent to a slot.
        """

    def leave(self, output: Tensor, streams: Tensor, mix: MixT, *, gather: Gather | None = None) -> Tensor:
        """The streams after the last sublayer of a range of layers that does not end with the final collapse."""


@dataclass(frozen=True)
class Unmultiplied:
    """A matrix bf16 [N, d] that is still to be multiplied with the layer's input."""

    weight: Tensor


@dataclass(frozen=True)
class Columns:
    """Results of an attention layer's first GEMMs, each [T, ...], the last dimension contiguous.

    Attributes:
        q_lora: [T, q_lora_rank]. kv: [T, head_dim].
        compressor, index_compressor: (kv, score) of each compressor, [T, w].
        index_weights: [T, index heads], or their matrix: then ``prepare_attention`` has them multiplied.
    """

    q_lora: Tensor
    kv: Tensor
    compressor: tuple[Tensor, Tensor] | None = None
    index_compressor: tuple[Tensor, Tensor] | None = None
    index_weights: Tensor | Unmultiplied | None = None


class InputProjection(Protocol):
    """GEMMs that read the input of an attention layer."""

    @property
    def takes(self) -> Form: ...

    def __call__(self, x: Activation) -> Columns: ...


class Projection(Protocol):
    """GEMMs that read one activation, merged as far as their storage allows.

    One of a single shard may have a method ``send(x, places)``, which stores the columns in all of ``places``, tensors
    [T, rows], and returns the first; absent or ``None`` where the kernel stores in one.
    """

    @property
    def takes(self) -> Form: ...

    def __call__(self, x: Activation, first: int | None = None) -> list[Tensor]:
        """[T, rows] for each shard, in the order given; of the ``first`` so many alone if that is given."""


class GroupedProjection(Protocol):
    """The block-diagonal GEMM of the attention output (specification §3.4)."""

    @property
    def takes(self) -> Form: ...

    def __call__(self, x: Activation, form: Form) -> Activation:
        """[T, G * N] in ``form``, from [T, G, K]."""


@dataclass(frozen=True)
class Prepared:
    """The prepared inputs that the rest of an attention layer reads.

    Attributes:
        q_lora: normalised. index_weights: [T, index heads] in CSA layers, not scaled.
    """

    q_lora: Activation
    index_weights: Tensor | None


class AttentionInputs(Protocol[StepIn]):
    """Normalise the latents; write window rows, compressed entries, index keys and compressor states."""

    def __call__(self, columns: Columns, x: Activation, step: StepIn, cache: LayerCache, form: Form) -> Prepared:
        """Write the caches and normalise q_lora to ``form``; compute from ``x`` the columns that are still missing.

        All cache writes of the pass come before any read of ``attend``.
        """


class Selection(Protocol[StepIn, EntriesOut]):
    """The lightning indexer: which ratio-4 entries each query attends to (specification §5)."""

    def scores(self, step: StepIn) -> bool:
        """Whether queries are scored in this pass, so that ``index_q`` is read."""

    def __call__(self, index_q: Tensor | None, weights: Tensor, step: StepIn, cache: LayerCache) -> EntriesOut:
        """The chosen entries, for ``attend``; index_q [T, heads * dim] and weights [T, heads] as projected."""


class AttentionCore(Protocol[StepIn, EntriesIn]):
    """Query norm and RoPE, sparse attention with a sink, inverse RoPE (specification §3.1 to 3.3)."""

    def __call__(self, q: Tensor, step: StepIn, cache: LayerCache, entries: EntriesIn | None, form: Form) -> Activation:
        """[T, G, heads of a group * head_dim] in ``form``.

        Args:
            q: [T, heads * head_dim] as projected.
            entries: from ``select``; ``None`` in HCA and window-only layers.
        """


class MtpInput(Protocol):
    """The streams that MTP's block begins with (specification §7)."""

    def __call__(self, embedded: Tensor, streams: Tensor) -> Tensor:
        """Streams [T, n, d] in the model dtype, from embeddings [T, d] of the next tokens and the target's streams."""


class DsparkInput(Protocol):
    """The target's states that DSpark's stages read (specification §7)."""

    def __call__(self, means: Tensor, takes: Form) -> Activation:
        """[T, d], normalised, in the form ``takes``; from the mean streams behind the captured layers, [T, layers * d]
        in the model dtype.
        """


class DsparkGuesses(Protocol):
    """From DSpark's hidden states to the tokens of a block (specification §7)."""

    @property
    def w1(self) -> Tensor:
        """[vocabulary, r], of the bias by the token before; ``w2`` as well."""

    @property
    def w2(self) -> Tensor: ...

    def logits(self, hidden: Tensor, head: Tensor) -> Tensor:
        """fp32 [T, vocabulary], from hidden states [T, d] and the target's LM head [rows, d], maybe padded."""

    def choose(self, logits: Tensor, anchor: Tensor) -> Tensor:
        """Greedy tokens int64 [B, block], from logits [B, block, vocabulary] and int64 [B] anchors."""


@dataclass(frozen=True)
class DsparkBoundaries:
    """The boundaries that only DSpark has on a target.

    Attributes:
        capture: writes the mean of streams [T, n, d] to columns [T, d] of what ``input`` reads.
        input: made with the prefix of the first stage's tensor names. guesses: with that of the last stage.
    """

    capture: Callable[[Tensor, Tensor], object]
    input: Callable[[Context, str], DsparkInput]
    guesses: Callable[[Context, str], DsparkGuesses]


class Router(Protocol[StepIn, RoutesOut]):
    """Chooses the experts of each token and their weights (specification §6.1)."""

    def __call__(self, x: Tensor, token_ids: Tensor, step: StepIn) -> RoutesOut:
        """x [T, d] in the model dtype; ids int [T], by which the first layers route."""


class Experts(Protocol[StepIn, RoutesIn]):
    """Routed experts and the shared one.

    There may be a method ``send(x, routes, step, places)``, which stores the result of a call in all of ``places``,
    tensors [T, d], and returns the first.
    """

    @property
    def takes(self) -> Form: ...

    def __call__(self, x: Activation, routes: RoutesIn, step: StepIn) -> Tensor:
        """[T, d], this rank's part of the weighted sum."""


@dataclass(frozen=True)
class Boundaries(Generic[StepT, MixT, EntriesT, RoutesT, ExpertsT]):
    """The implementation of every boundary on one target: called once a layer while weights are loaded.

    Each takes the :class:`Context` first; what it returns is what runs.
    """

    plan: Callable[[Context, Slots, Sequence[LayerCache]], Planner[StepT]]
    embed: Callable[[Context], Embedding]
    site: Callable[[Context, SiteNames, Form], Site[StepT, MixT]]
    project_input: Callable[[Context, Sequence[Shard], Shard | None], InputProjection]
    project: Callable[[Context, Sequence[Shard]], Projection]
    project_groups: Callable[[Context, Shard, int], GroupedProjection]
    prepare_attention: Callable[[Context, LayerSpec], AttentionInputs[StepT]]
    select: Callable[[Context, LayerSpec], Selection[StepT, EntriesT]]
    attend: Callable[[Context, LayerSpec], AttentionCore[StepT, EntriesT]]
    route: Callable[[Context, LayerSpec, ExpertsT], Router[StepT, RoutesT]]
    """Also told the experts, whose GEMMs say how rows are grouped."""
    experts: Callable[[Context, Sequence[ExpertMatrices]], ExpertsT]
    mtp_input: Callable[[Context, str], MtpInput] | None = None
    """Told what the names of the draft's tensors begin with; ``None`` where the target does not draft so."""
    dspark: DsparkBoundaries | None = None
    """``None`` where the target does not draft so."""

    def names(self) -> dict[str, str]:
        """``module:name`` of the implementation of each boundary of a pass, and in brackets what it is bound to.

        What drafts have of their own, which no pass of the decoder has, is left out.
        """
        required = [each.name for each in fields(self) if each.default is MISSING]
        return {name: _where(getattr(self, name)) for name in required}


def _where(item: Any) -> str:
    if isinstance(item, functools.partial):
        return f"{_where(item.func)} ({', '.join(map(str, item.args))})"
    return f"{item.__module__}:{item.__qualname__}"


AnyBoundaries = Boundaries[Any, Any, Any, Any, Any]
"""A target's, whichever it is."""


@dataclass(frozen=True)
class SiteNames:
    """Names of an mHC site's tensors: ``<stem>_fn``, ``_base``, ``_scale``, and the RMSNorm weight behind it.

    ``iterations``: of Sinkhorn; 0 for the final collapse, which has no post and comb.
    """

    stem: str
    norm: str
    iterations: int


@dataclass(frozen=True)
class Context:
    """The shared arguments that every module of the decoder is built from.

    Attributes:
        source: where tensors are read from; building a module reads its tensors.
        config: the model's dimensions.
        boundaries: the target's implementations.
        device: where parameters go.
        dtype: the model dtype, which activations between boundaries have.
        mode: what enters GEMMs with quantised weights.
        parallel: this rank's share; the whole model unless given.
        policy: what may depend on the number of tokens.
        uniform_experts: routing by scores is simulated (:mod:`.uniform_experts`).
        draft: what the passes of a draft multiply; ``None`` for the decoder's.
    """

    source: WeightSource
    config: ModelConfig
    boundaries: AnyBoundaries
    device: torch.device = CPU
    dtype: torch.dtype = torch.float32
    mode: ActivationMode = ActivationMode.W4A16
    parallel: TensorParallel = field(default_factory=TensorParallel)
    uniform_experts: bool = False
    policy: Policy = field(default_factory=Policy)
    draft: DraftMatrices | None = None

    def tokens(self, count: int) -> Tokens:
        """This rank's share of the tokens of a pass of ``count``."""
        return tokens_of(self.parallel, count, self.policy.tokens(Choice.DIVISION, count))

    def read(self, name: str, rows: slice | None = None) -> Tensor:
        """Tensor ``name`` on the device, in the checkpoint's dtype; a copy, so that the file may be changed."""
        return self.source.read(name, rows=rows).to(self.device, copy=True)
