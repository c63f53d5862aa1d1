"""The state that all layers of one pass share, and the scratch memory that outlives a pass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from nvfp4_sgl.cache.layout import Rings
from nvfp4_sgl.config import LayerKind, ModelConfig, RopeTable
from nvfp4_sgl.limits import MAX_ROUTED_EXPERTS, MAX_SCORES_AT_ONCE
from nvfp4_sgl.model.contract import PassKind
from nvfp4_sgl.model.policy import Choice, Policy
from nvfp4_sgl.model.rope_tables import frequencies
from nvfp4_sgl.triton_kernels.attention.sparse_attention import new_semaphores
from nvfp4_sgl.triton_kernels.attention_inputs.compressor import Workspace, new_workspace
from nvfp4_sgl.triton_kernels.common.rope import rope_cos_sin
from nvfp4_sgl.triton_kernels.experts.router_logits import semaphores_size
from nvfp4_sgl.triton_kernels.hyper_connection.site import new_site_semaphores
from nvfp4_sgl.triton_kernels.indexer.topk import Candidates, new_candidates
from nvfp4_sgl.triton_kernels.plan.resolve import Plan, resolve


def index_entries(longest: int) -> int:
    """Ratio-4 entries of a sequence of ``longest`` tokens, rounded up to whole pages of 64."""
    return -(-max(longest // 4, 1) // 64) * 64


def score_rows(tokens: int, longest: int) -> int:
    """Tokens of a prompt whose index scores are held at once: all, or where that is too much a multiple of 16.

    Parts of a prompt then begin at aligned addresses: Triton compiles another variant for others.
    """
    at_once = max(1, MAX_SCORES_AT_ONCE // index_entries(longest))
    return min(tokens, at_once // 16 * 16 or at_once)


def device_frequencies(config: ModelConfig, device: torch.device) -> dict[RopeTable, Tensor]:
    """RoPE frequencies of each table, fp32 [rope_dim / 2] on the device."""
    return {table: frequencies(config, table).to(device) for table in RopeTable}


class Scratch:
    """Device memory that outlives a pass: semaphores and workspaces that kernels leave ready for the next launch.

    One scratch serves one decoder on one stream. What was handed out stays allocated, as a captured graph may hold it.

    Attributes:
        route_semaphore: int32 [1], counts the routing programs that are done; zero between launches.
        small_gemm_semaphores: int32, those of ``router_logits``, for the most experts that can be routed; zero as
            well.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self.route_semaphore = torch.zeros(1, dtype=torch.int32, device=device)
        self.small_gemm_semaphores = torch.zeros(semaphores_size(MAX_ROUTED_EXPERTS), dtype=torch.int32, device=device)
        self._workspaces: list[tuple[int, int, Workspace]] = []
        self._attention_semaphores: list[Tensor] = []
        self._site_semaphores: list[tuple[int, Tensor]] = []
        self._candidates: list[tuple[int, int, Candidates]] = []

    def workspace(self, tokens: int, requests: int) -> Workspace:
        """A workspace of the compressors that suffices for a pass of so many tokens and requests."""
        for known_tokens, known_requests, workspace in self._workspaces:
            if tokens <= known_tokens and requests <= known_requests:
                return workspace
        self._workspaces.insert(0, (tokens, requests, new_workspace(tokens, requests, self._device)))
        return self._workspaces[0][2]

    def attention_semaphores(self, tokens: int, heads: int) -> Tensor:
        """Semaphores of sparse attention for at least so many queries of so many heads."""
        if not self._attention_semaphores or self._attention_semaphores[-1].numel() < tokens * heads:
            self._attention_semaphores.append(new_semaphores(tokens, heads, self._device))
        return self._attention_semaphores[-1]

    def site_semaphores(self, tokens: int) -> Tensor:
        """Semaphores of hyper-connections for at least so many tokens."""
        if not self._site_semaphores or self._site_semaphores[-1][0] < tokens:
            self._site_semaphores.append((tokens, new_site_semaphores(tokens, self._device)))
        return self._site_semaphores[-1][1]

    def candidates(self, rows: int, columns: int, topk: int) -> Candidates:
        """Room to select ``topk``, the decoder's, of ``columns`` scores for each of ``rows`` queries, or of more."""
        for known_rows, known_columns, candidates in self._candidates:
            if rows <= known_rows and columns <= known_columns:
                return candidates
        # Powers of two, so that everything ever handed out is not much more than the largest.
        rows, columns = 1 << max(rows - 1, 0).bit_length(), 1 << max(columns - 1, 0).bit_length()
        self._candidates.insert(0, (rows, columns, new_candidates(rows, columns, topk, self._device)))
        return self._candidates[0][2]


@dataclass(frozen=True)
class Step:
    """One pass: its tokens' slots, and the tensors that all layers read or write.

    Attributes:
        plan: the batch and its slots.
        cos_sin: fp32 [T, rope_dim] by table, cos and sin of each position.
        scores: fp32 [rows, ratio-4 entries], room for the index scores of ``rows`` queries at once.
        workspace: workspace of the ratio-128 compressors.
        attention_semaphores, site_semaphores, small_gemm_semaphores, route_semaphore: int32, zero between launches:
            the semaphores of sparse attention, hyper-connections, router's logits and index weights, and routing.
        candidates: workspace of the selection of ratio-4 entries.
        planned: the number of tokens that a choice goes by.
        rings: rows of the compressors' state rings.
        is_by_size: whether all sizes follow from the numbers of tokens and requests, for the longest sequence.
    """

    plan: Plan
    cos_sin: dict[RopeTable, Tensor]
    scores: Tensor
    workspace: Workspace
    attention_semaphores: Tensor
    site_semaphores: Tensor
    small_gemm_semaphores: Tensor
    route_semaphore: Tensor
    candidates: Candidates
    planned: Mapping[Choice, int]
    rings: Rings
    is_by_size: bool

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
        kind: PassKind,
        policy: Policy,
        rings: Rings,
        scores: Tensor | None = None,
    ) -> Step:
        """Room for a pass over these tokens, contents undefined.

        Args:
            config: the model's.
            scratch: the decoder's.
            positions: int64 [T].
            requests: int64 [B].
            slots: int32 [request slots, columns].
            full_to_swa: int64 [full slots].
            longest: tokens of the longest sequence that may come, as the host knows it.
            kind: of the pass.
            policy: what may depend on the number of tokens.
            rings: rows of the compressors' state rings.
            scores: from :meth:`new_scores` for as many tokens or more; allocated unless given.
        """
        (tokens,), (count,), device = positions.shape, requests.shape, positions.device
        plan = Plan.allocate(
            positions,
            requests,
            slots,
            full_to_swa,
            window=config.sliding_window,
            longest=longest,
            tokens_each=tokens // count if kind in (PassKind.DECODE, PassKind.VERIFY) and count else None,
            is_block=kind is PassKind.BLOCK,
        )
        rows = tokens if kind.is_by_size else score_rows(tokens, longest)
        scores = cls.new_scores(config, rows, longest, device) if scores is None else scores[:rows]
        cos_sin = torch.empty(len(RopeTable), tokens, config.qk_rope_head_dim, dtype=torch.float32, device=device)
        semaphores = scratch.attention_semaphores(tokens, config.num_attention_heads)
        workspace = scratch.workspace(tokens, count)
        candidates = scratch.candidates(scores.shape[0], scores.shape[1], config.index_topk)
        return cls(
            plan,
            dict(zip(RopeTable, cos_sin, strict=True)),
            scores,
            workspace,
            semaphores,
            scratch.site_semaphores(tokens),
            scratch.small_gemm_semaphores,
            scratch.route_semaphore,
            candidates,
            {choice: policy.tokens(choice, tokens) for choice in (Choice.ATTENTION, Choice.SMALL_GEMM, Choice.INPUTS)},
            rings,
            kind.is_by_size,
        )

    @staticmethod
    def new_scores(config: ModelConfig, rows: int, longest: int, device: torch.device | str) -> Tensor:
        """Room for index scores, fp32 [rows, ratio-4 entries of ``longest`` tokens]; no columns without CSA layers."""
        columns = index_entries(longest) if LayerKind.CSA in config.layer_kinds else 0
        return torch.empty(rows, columns, dtype=torch.float32, device=device)

    def prepare(self, frequencies: dict[RopeTable, Tensor], seq_lens: Tensor, new_tokens: Tensor | None) -> None:
        """Fill in the plan, cos and sin on the device; kernels only, so that a graph can hold it.

        Args:
            frequencies: from :func:`device_frequencies`.
            seq_lens: int32 or int64 [B], lengths after this pass.
            new_tokens: int32 or int64 [B], tokens that each request adds; ``None`` if each adds one.
        """
        resolve(self.plan, seq_lens, new_tokens)
        for table, cos_sin in self.cos_sin.items():
            rope_cos_sin(self.plan.batch.positions, frequencies[table], cos_sin)
