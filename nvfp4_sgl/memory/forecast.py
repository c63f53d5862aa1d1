"""Forecast of a rank's memory: bytes by part, tokens that fit, and an error with the arithmetic if they do not."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from nvfp4_sgl.cache.layout import PAGE_TOKENS
from nvfp4_sgl.checkpoint.drafts import Draft, DraftKind
from nvfp4_sgl.checkpoint.verified import Verified
from nvfp4_sgl.config import LayerKind, ModelConfig
from nvfp4_sgl.errors import UnsupportedError
from nvfp4_sgl.limits import MAX_SCORES_AT_ONCE
from nvfp4_sgl.memory.pools import (
    LEAST_WINDOW_TOKENS,
    bytes_per_server,
    bytes_per_token,
    draft_bytes_per_token,
    inbox_bytes,
    largest_chunk,
    least_tokens,
)
from nvfp4_sgl.memory.setting import Setting
from nvfp4_sgl.memory.weights import draft_weight_bytes, weight_bytes
from nvfp4_sgl.ops.modes import ActivationMode
from nvfp4_sgl.prompt_sizes import TOKENS
from nvfp4_sgl.targets.target import Descriptor, descriptor

GPU_RUNTIME_BYTES = 3 << 29
"""Estimated: CUDA context, compiled kernels and their workspace (18.5 MiB on a B200), NCCL and captured graphs of a
rank, 1.5 GiB."""
PROMPTS = "prompt graphs"
INBOXES = "inboxes of pushed sums"
GRAPH_LAYER_BYTES = 9 << 17
"""What the driver keeps for a layer's launches in a captured prompt pass: 1.1 MiB, estimated. On H200s eight graphs of
43 layers took 0.4 GB more than their activations (``launch/results/flash_tp2_h200.md``)."""


@dataclass(frozen=True)
class Forecast:
    """Bytes of one rank by part.

    Attributes:
        weights, server, token: by part; ``token`` for each token of capacity, ``server`` whatever that is.
        estimated: graphs and workspaces, which only a run can tell; in what ``fraction`` leaves over.
        free: of the rank's device, before anything is loaded; of a CPU its share of the host's; ``None`` if unknown.
        tokens: that fit, whole pages, at most ``--max-total-tokens``; ``None`` if ``free`` is.
    """

    setting: Setting
    weights: dict[str, int]
    server: dict[str, int]
    token: dict[str, float]
    estimated: dict[str, int]
    free: int | None
    tokens: int | None

    @property
    def fixed(self) -> int:
        """Weights and the pools that do not depend on the number of tokens."""
        return sum(self.weights.values()) + sum(self.server.values())

    def with_free(self, free: int | None) -> Forecast:
        """The same rank on a device with so many bytes free; ``None`` if that is unknown."""
        if free is None:
            return replace(self, free=None, tokens=None)
        left = free * self.setting.fraction - self.fixed
        tokens = max(int(left / sum(self.token.values())), 0) // PAGE_TOKENS * PAGE_TOKENS
        most = self.setting.most_tokens
        return replace(self, free=free, tokens=tokens if most is None else min(tokens, most))

    def lines(self) -> list[str]:
        """The arithmetic, a line a part."""
        setting = self.setting
        found = [f"weights             {gb(sum(self.weights.values()))}  {_parts(self.weights)}"]
        found.append(f"pools, requests     {gb(sum(self.server.values()))}  {_parts(self.server)}")
        per_token = ", ".join(f"{name} {value:.0f}" for name, value in self.token.items())
        found.append(f"pools, a token      {sum(self.token.values()):7.0f} B   {per_token}")
        found.append(f"estimated           {gb(sum(self.estimated.values()))}  {_parts(self.estimated)}")
        if self.free is not None and self.tokens is not None:
            budget = self.free * setting.fraction
            found.append(
                f"free                {gb(self.free)}  of which weights and pools may take {setting.fraction:.3g}:"
                f" {gb(budget).strip()}; {gb(max(budget - self.fixed, 0)).strip()} are left for tokens"
            )
            found.append(f"tokens              {self.tokens:10,d}  of {setting.requests} requests at once")
            chunk = largest_chunk(self._window_tokens(self.tokens))
            if setting.window_by_ratio and 0 < chunk < setting.chunk:
                found.append(f"prefill chunk       {chunk:10,d}  not {setting.chunk:,d}: the window pool holds no more")
        return found

    def _window_tokens(self, tokens: int) -> int:
        return int(tokens * self.setting.swa_ratio) // PAGE_TOKENS * PAGE_TOKENS

    def summary(self) -> str:
        """The sums in one line."""
        parts = (("weights", self.weights), ("pools for requests", self.server), ("estimated", self.estimated))
        words = [f"{name} {gb(sum(values.values())).strip()}" for name, values in parts]
        if self.free is not None and self.tokens is not None:
            words += [f"free {gb(self.free).strip()}", f"room for {self.tokens:,d} tokens"]
        return ", ".join(words)

    @property
    def fits(self) -> bool | None:
        """Whether a server would start; ``None`` if what is free is unknown."""
        return None if self.free is None else self.shortage() is None

    def problem(self) -> str | None:
        """:meth:`shortage` with the arithmetic."""
        shortage = self.shortage()
        return None if shortage is None else "".join((shortage, *(f"\n  {line}" for line in self.lines())))

    def shortage(self) -> str | None:
        """Why a server would not start, and the flags to change; ``None`` if it would."""
        if self.free is None or self.tokens is None:
            return None
        setting = self.setting
        least = least_tokens(setting.swa_ratio)
        if setting.most_tokens is not None and setting.most_tokens < least:
            if setting.window_by_ratio:
                return small_window(self._window_tokens(setting.most_tokens), f"at least {least} tokens in all")
            least = setting.most_tokens
        estimated, budget = sum(self.estimated.values()), self.free * setting.fraction
        short = []
        if self.tokens < least:
            needed = self.fixed + least * sum(self.token.values())
            short.append(
                f"weights and pools for {least} tokens need {gb(needed).strip()},"
                f" --mem-fraction-static {setting.fraction:.3g} of {gb(self.free).strip()} free is {gb(budget).strip()}"
                f" ({gb(needed - budget).strip()} too little)"
            )
            if needed + estimated <= self.free:
                short.append(f"raise --mem-fraction-static above {needed / self.free:.3f}")
        elif self.free - budget < estimated and self.fixed + estimated > self.free:
            short.append(
                f"weights, pools and an estimated {gb(estimated).strip()} of workspaces exceed {gb(self.free).strip()}"
            )
        if not short:
            return None
        flags = "a larger --tp-size, a smaller --max-running-requests or --context-length, or another device"
        return f"too little memory on a rank of --tp-size {setting.ranks}: {'; '.join(short)}; use {flags}"

    def check(self) -> None:
        """:class:`UnsupportedError` with :meth:`problem` if there is one."""
        if problem := self.problem():
            raise UnsupportedError(problem)

    def as_json(self) -> dict[str, Any]:
        """For ``/server_info`` and ``doctor --json``; bytes."""
        return asdict(self)


def small_window(window_tokens: int, needed: str = "") -> str:
    """The error of a window pool in which prompts after a cached prefix may wait for ever; ``needed`` for it not to."""
    return (
        f"window pool: found {window_tokens} tokens, expected at least {LEAST_WINDOW_TOKENS}"
        f"{f' ({needed})' if needed else ''}. In fewer, a prompt behind a cached prefix may wait for ever. Raise"
        " --max-total-tokens or --swa-full-tokens-ratio, or --mem-fraction-static where --max-total-tokens is not given"
    )


def forecast(
    verified: Verified,
    target: str,
    setting: Setting,
    free: int | None,
    mode: ActivationMode | None = None,
    stage: range | None = None,
) -> Forecast:
    """Forecast the memory of one rank of a server, or of a stage.

    Args:
        free: as in :class:`Forecast`. mode: the target's default unless given.
        stage: its layers, all unless given.

    Raises:
        ConfigError: the model cannot be split over so many ranks.
    """
    config = verified.config
    storage = verified.inventory.storage
    weights = weight_bytes(config, storage, target, setting.owner, setting.dtype_bytes, mode, stage)
    sizes = (setting.requests, setting.context)
    server = bytes_per_server(config, *sizes, stage, setting.rings, setting.round_tokens)
    if setting.pushed_tokens:
        models = 1 if setting.draft is None else 2  # a draft's ranks have inboxes of their own
        server[INBOXES] = models * inbox_bytes(config, setting.ranks, setting.pushed_tokens)
    token = bytes_per_token(config, setting.row_bytes, setting.swa_ratio, stage, setting.rings)
    estimated = _estimated(config, descriptor(target, mode), setting)
    if setting.draft is not None:
        draft, layers = verified.draft(), len(config.stage(stage))
        assert draft is not None and draft.kind is setting.draft, "what a server has checked before"
        weights["draft"] = draft_weight_bytes(config, draft, target, setting.owner, mode)
        rows = (setting.row_bytes, setting.swa_ratio)
        token["draft"] = draft_bytes_per_token(config, token, *rows, stages=draft.stages, layers=layers)
        if draft.kind is DraftKind.DSPARK:
            estimated |= dspark_buffers(config, draft, setting)
        if setting.prompt_tokens:
            estimated[PROMPTS] += setting.prompt_tokens * _bytes_for_draft(config, draft, setting)
    return Forecast(setting, weights, server, token, estimated, None, None).with_free(free)


def _estimated(config: ModelConfig, chosen: Descriptor, setting: Setting) -> dict[str, int]:
    """Graphs and workspaces: the large buffers of a pass, each once; some targets have fp32 sums beside them."""
    visits, hidden = config.num_experts_per_tok + 1, config.hidden_size
    inner, heads = len(setting.owner.experts(config).inner), len(setting.owner.heads(config))
    streams = 3 * config.hc_mult * hidden
    rows = visits * (2 * hidden + 3 * inner)
    queries = 2 * heads * config.head_dim
    if chosen.fp32_sums:
        rows, queries = rows + 2 * visits * inner, 2 * queries
    token = (streams + max(rows, queries)) * setting.dtype_bytes
    chunk = setting.chunk * token
    if not chosen.on_gpu:
        return {"activations of a prefill chunk": chunk}
    graph_tokens = setting.requests * max(setting.round_tokens, 1)
    scores = graph_tokens * setting.context if LayerKind.CSA in config.layer_kinds else 0  # 4 bytes for 4 tokens
    found = {
        "activations of a prefill chunk": chunk,
        "index scores of graphs": scores,
        "CUDA context, kernels, graphs": GPU_RUNTIME_BYTES,
    }
    if setting.prompt_tokens:
        found[PROMPTS] = _prompt_graphs(config, setting, token, scores)
    return found


def _prompt_graphs(config: ModelConfig, setting: Setting, token: int, scores: int) -> int:
    """Bytes of captured prompts.

    They are the activations of the largest, which all use, and index scores, unless those of decode suffice. Each
    graph has slots of ratio-128 entries, of 4 bytes, for twice the tokens of the largest in all, and its launches. A
    model whose index chooses has two graphs of a size (``..model.static_prompt``).

    Args:
        token: bytes of a token's activations. scores: of the index scores of decode.
    """
    tokens, longest = setting.prompt_tokens, setting.context
    own = min(tokens * longest, 4 * MAX_SCORES_AT_ONCE)
    graphs = sum(size <= tokens for size in TOKENS) * (1 + (LayerKind.CSA in config.layer_kinds))
    launches = graphs * len(config.layer_kinds) * GRAPH_LAYER_BYTES
    return tokens * token + (own if own > scores else 0) + 2 * tokens * longest // 128 * 4 + launches


def dspark_buffers(config: ModelConfig, draft: Draft, setting: Setting) -> dict[str, int]:
    """Buffers of DSpark's passes: what a chunk's pass captures, with its projection in fp32 and normalised; the logits
    of blocks of as many requests as there may be.
    """
    guesses = setting.requests * (setting.round_tokens - 1)
    return {
        "DSpark's context of a chunk": setting.chunk * _bytes_for_draft(config, draft, setting),
        "DSpark's logits": guesses * config.vocab_size * 4,
    }


def _bytes_for_draft(config: ModelConfig, draft: Draft, setting: Setting) -> int:
    """Bytes of a token that a pass computes for a draft: DSpark's context, or streams in the room that graphs share."""
    if draft.kind is not DraftKind.DSPARK:
        return config.hc_mult * config.hidden_size * setting.dtype_bytes
    (projection,) = draft.projections
    features, captured = projection.shape
    return int(captured * setting.dtype_bytes + features * (4 + setting.dtype_bytes))


def gb(nbytes: float) -> str:
    """Bytes in units of 10^9."""
    return f"{nbytes / 1e9:7.2f} GB"


def _parts(parts: dict[str, int]) -> str:
    return ", ".join(f"{name} {nbytes / 1e9:.2f}" for name, nbytes in parts.items())
