"""Uniform routing for measurements, as SGLang 0.5.23 has it with ``SGLANG_SIMULATE_UNIFORM_EXPERTS=1``.

There (``layers/moe/topk.py``, ``_simulate_balanced_routing``), a token of a layer that routes by scores goes to experts
``(base + j * (E // k)) % E`` for j < k. Each place in the batch has a random base, and weights are ``1 / k`` times the
routed scaling factor. The router's own GEMM runs, and its result is ignored. Layers that route by token id are
unchanged. Here a base belongs to layer and place and stays the same from pass to pass, as it does in SGLang's captured
graphs; the tables are made at load, so that a pass launches nothing more than otherwise.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from nvfp4_sgl.config import ModelConfig
from nvfp4_sgl.errors import OperandValueError
from nvfp4_sgl.synthetic.random_words import key_of, words
from nvfp4_sgl.weights.source import frozen

MAX_TOKENS = 1 << 16
"""Places of a batch that have a base."""


class UniformExperts(nn.Module):
    """Operands with which routing by token id chooses uniformly, with equal weights.

    Attributes:
        table: int32 [E, k], the experts of each base.
        bases: int32 [MAX_TOKENS], the base of each place of a batch: what stands for its token's id.
        logits: fp32 [1, E], zeros: every expert scores alike.
    """

    def __init__(self, config: ModelConfig, layer: int, device: torch.device):
        super().__init__()
        experts, topk = config.n_routed_experts, config.num_experts_per_tok
        drawn = words(key_of(f"uniform experts of layer {layer}", 0), range(1), range(MAX_TOKENS), MAX_TOKENS, device)
        base, place = torch.arange(experts, device=device), torch.arange(topk, device=device)
        self.bases = frozen((drawn[0] % experts).int())
        self.table = frozen(((base[:, None] + place * (experts // topk)) % experts).int())
        # The router's dtype, whatever the default is: SGLang loads dummy weights with the model's.
        self.logits = frozen(torch.zeros(1, experts, dtype=torch.float32, device=device))

    def operands(self, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
        """Logits fp32 [tokens, E], table, and ids int32 [tokens]; views.

        Raises:
            OperandValueError: the pass has too many tokens.
        """
        if tokens > MAX_TOKENS:
            raise OperandValueError(
                f"SGLANG_SIMULATE_UNIFORM_EXPERTS: expected at most {MAX_TOKENS} tokens in a pass, found {tokens};"
                " use a smaller --chunked-prefill-size"
            )
        return self.logits.data.expand(tokens, -1), self.table.data, self.bases.data[:tokens]
