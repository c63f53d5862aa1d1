"""What all layers of one pass share."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nvfp4_sgl.config import LayerKind, ModelConfig
from nvfp4_sgl.ops.rope import inverse_frequencies
from nvfp4_sgl.triton_kernels.attention.sparse_attention import new_arrivals
from nvfp4_sgl.triton_kernels.attention_inputs.compressor import Workspace, new_workspace
from nvfp4_sgl.triton_kernels.common.rope import rope_turns
from nvfp4_sgl.triton_kernels.hyper_connection.site import new_counters
from nvfp4_sgl.triton_kernels.indexer.topk import Candidates, new_candidates
from nvfp4_sgl.triton_kernels.plan.resolve import Plan, resolve

SCORE_VALUES = 1 << 26
"""fp32 index scores held at once (256 MiB), unless one query alone has more: a prompt is scored in parts."""


def index_entries(longest: int) -> int:
    """Ratio-4 entries of a sequence, up to whole pages."""
    return -(-max(longest // 4, 1) // 64) * 64


@dataclass(frozen=True)
class Frequencies:
    """RoPE frequencies, fp32 [rope_dim / 2] on the device: window-only layers, and compressed ones."""

    window: Tensor
    compressed: Tensor

    @classmethod
    def of(cls, config: ModelConfig, device: torch.device) -> Frequencies:
        dim = config.qk_rope_head_dim
        with torch.device("cpu"):  # a GPU's powers differ in the last place, and SGLang loads models under its device
            window = inverse_frequencies(dim, config.rope_theta)
            compressed = inverse_frequencies(dim, config.compress_rope_theta, config.yarn)
        return cls(window.to(device), compressed.to(device))


class Scratch:
    """Device memory that outlives a pass, because kernels find it as they left it. One decoder, one stream.

    What was handed out stays allocated: a captured graph may hold it.

    Attributes:
        arrivals: int32 [1], where programs count themselves in; zero between launches.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self.arrivals = torch.zeros(1, dtype=torch.int32, device=device)
        self._workspaces: list[tuple[int, int, Workspace]] = []
        self._counters: list[Tensor] = []
        self._site_counters: list[tuple[int, Tensor]] = []
        self._candidates: list[tuple[int, int, Candidates]] = []

    def workspace(self, tokens: int, requests: int) -> Workspace:
        """A workspace of the compressors that is enough for a pass of so many tokens and requests."""
        for known_tokens, known_requests, workspace in self._workspaces:
            if tokens <= known_tokens and requests <= known_requests:
                return workspace
        self._workspaces.insert(0, (tokens, requests, new_workspace(tokens, requests, self._device)))
        return self._workspaces[0][2]

    def attention_arrivals(self, tokens: int, heads: int) -> Tensor:
        """Counters of sparse attention, enough for so many queries of so many heads."""
        if not self._counters or self._counters[-1].numel() < tokens * heads:
            self._counters.append(new_arrivals(tokens, heads, self._device))
        return self._counters[-1]

    def site_counters(self, tokens: int) -> Tensor:
        """Counters of hyper-connections, enough for so many tokens."""
        if not self._site_counters or self._site_counters[-1][0] < tokens:
            self._site_counters.append((tokens, new_counters(tokens, self._device)))
        return self._site_counters[-1][1]

    def candidates(self, rows: int, columns: int, topk: int) -> Candidates:
        """Room for the choice of the decoder's ``topk`` among so many scores of so many queries."""
        for known_rows, known_columns, candidates in self._candidates:
            if rows <= known_rows and columns <= known_columns:
                return candidates
        # By powers of two, so that all that was handed out is not much more than the largest.
        rows, columns = 1 << max(rows - 1, 0).bit_length(), 1 << max(columns - 1, 0).bit_length()
        self._candidates.insert(0, (rows, columns, new_candidates(rows, columns, topk, self._device)))
        return self._candidates[0][2]


@dataclass(frozen=True)
class Step:
    """One pass: where its tokens stand, and what the layers read of it.

    Attributes:
        plan: slots.
        window_turns, compressed_turns: fp32 [T, rope_dim], for the two kinds of layers.
        scores: fp32 [rows, ratio-4 entries]: index scores of so many queries at once.
        workspace: of the ratio-128 compressors.
        arrivals: counters of sparse attention. site_counters: of hyper-connections.
        candidates: of the choice of entries.
    """

    plan: Plan
    window_turns: Tensor
    compressed_turns: Tensor
    scores: Tensor
    workspace: Workspace
    arrivals: Tensor
    site_counters: Tensor
    candidates: Candidates

    @classmethod
    def allocate(
        cls,
        config: ModelConfig,
        scratch: Scratch,
        positions: Tensor,
        requests: Tensor,
        slots: Tensor,
        full_to_swa: Tensor,
        *,
        longest: int,
        decode: bool,
        scores: Tensor | None = None,
    ) -> Step:
        """Room for a pass over these tokens.

        Args:
            scratch: the decoder's.
            positions: int64 [T]. requests: int64 [B].
            slots: int32 [request slots, columns]. full_to_swa: int64 [full slots].
            longest: tokens of the longest sequence that may come, as the host knows it.
            decode: every request adds one token.
            scores: from :meth:`new_scores` for as many tokens or more.
        """
        tokens, device = positions.shape[0], positions.device
        # Whole sixteens: Triton compiles apart for other strides.
        columns = -(-max(longest // 128, 1) // 16) * 16
        plan = Plan.allocate(positions, requests, slots, full_to_swa, window=config.sliding_window, columns=columns)
        rows = tokens if decode else min(tokens, max(1, SCORE_VALUES // index_entries(longest)))
        scores = cls.new_scores(config, rows, longest, device) if scores is None else scores[:rows]
        turns = torch.empty(2, tokens, config.qk_rope_head_dim, dtype=torch.float32, device=device)
        arrivals = scratch.attention_arrivals(tokens, config.num_attention_heads)
        workspace = scratch.workspace(tokens, requests.shape[0])
        candidates = scratch.candidates(scores.shape[0], scores.shape[1], config.index_topk)
        return cls(plan, turns[0], turns[1], scores, workspace, arrivals, scratch.site_counters(tokens), candidates)

    @staticmethod
    def new_scores(config: ModelConfig, rows: int, longest: int, device: torch.device | str) -> Tensor:
        """fp32 [rows, ratio-4 entries of ``longest`` tokens]; no columns for a model that scores nothing."""
        columns = index_entries(longest) if LayerKind.CSA in config.layer_kinds else 0
        return torch.empty(rows, columns, dtype=torch.float32, device=device)

    def prepare(self, frequencies: Frequencies, seq_lens: Tensor, new_tokens: Tensor | None) -> None:
        """Fill in everything but the scores; kernels only, so that a graph can hold it.

        Args:
            seq_lens: int [B], lengths after this pass. new_tokens: int [B]; ``None`` in decode.
        """
        resolve(self.plan, seq_lens, new_tokens)
        positions = self.plan.batch.positions
        rope_turns(positions, frequencies.window, self.window_turns)
        rope_turns(positions, frequencies.compressed, self.compressed_turns)
