"""MTP and DSpark in NumPy, fp64, written from the specification (§2, §3, §6, §7) and from nothing else here.

No cache: every pass is computed from whole sequences.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


class NumpyDraft:
    """The blocks of a draft over tensors ``weights`` by DeepSeek's names; ``config`` by config.json's."""

    def __init__(self, weights: Mapping[str, Array], config: Mapping[str, Any]):
        self.weights, self.config = weights, config

    def __getitem__(self, name: str) -> Array:
        return self.weights[name]

    def rms(self, x: Array, weight: Array | None = None) -> Array:
        y = x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + self.config["rms_norm_eps"])
        return y if weight is None else y * weight

    def rope(self, x: Array, positions: Array, sign: int = 1) -> Array:
        """Interleaved pairs of the last dimensions; x [T, ..., D], positions [T]."""
        width = self.config["qk_rope_head_dim"]
        frequencies = 1.0 / self.config["rope_theta"] ** (np.arange(0, width, 2) / width)
        angle = (positions[:, None] * frequencies) * sign
        angle = angle.reshape(len(x), *[1] * (x.ndim - 2), width // 2)
        y = x.copy()
        a, b = x[..., -width::2], x[..., -width + 1 :: 2]
        y[..., -width::2] = a * np.cos(angle) - b * np.sin(angle)
        y[..., -width + 1 :: 2] = a * np.sin(angle) + b * np.cos(angle)
        return y

    def mixes(self, x: Array, stem: str) -> Array:
        flat = x.reshape(len(x), -1)
        r = 1 / np.sqrt(np.mean(flat**2, axis=-1, keepdims=True) + self.config["rms_norm_eps"])
        return (flat @ self[f"{stem}_fn"].T) * r

    def site(self, x: Array, stem: str) -> tuple[Array, Array, Array]:
        """(collapsed, post, comb) of streams x [T, n, d]."""
        n, eps = x.shape[1], self.config["hc_eps"]
        mix, base, scale = self.mixes(x, stem), self[f"{stem}_base"], self[f"{stem}_scale"]
        pre = sigmoid(mix[:, :n] * scale[0] + base[:n]) + eps
        post = 2 * sigmoid(mix[:, n : 2 * n] * scale[1] + base[n : 2 * n])
        z = (mix[:, 2 * n :] * scale[2] + base[2 * n :]).reshape(-1, n, n)
        comb = np.exp(z - z.max(-1, keepdims=True))
        comb = comb / comb.sum(-1, keepdims=True) + eps
        comb = comb / (comb.sum(1, keepdims=True) + eps)
        for _ in range(self.config["hc_sinkhorn_iters"] - 1):
            comb = comb / (comb.sum(2, keepdims=True) + eps)
            comb = comb / (comb.sum(1, keepdims=True) + eps)
        return np.einsum("tk,tkd->td", pre, x), post, comb

    def collapse(self, x: Array, stem: str) -> Array:
        """The final collapse, not normalised."""
        pre = sigmoid(self.mixes(x, stem) * self[f"{stem}_scale"] + self[f"{stem}_base"]) + self.config["hc_eps"]
        return np.einsum("tk,tkd->td", pre, x)

    def keys(self, x: Array, stem: str, positions: Array) -> Array:
        """[T, D] of normalised inputs."""
        return self.rope(self.rms(x @ self[f"{stem}.wkv.weight"].T, self[f"{stem}.kv_norm.weight"]), positions)

    def attention(self, x: Array, stem: str, positions: Array, seen: Sequence[Array]) -> Array:
        """[T, d]; ``seen`` are each query's keys [n, D]."""
        heads, dim = self.config["num_attention_heads"], self.config["head_dim"]
        q = self.rms(x @ self[f"{stem}.wq_a.weight"].T, self[f"{stem}.q_norm.weight"])
        q = self.rope(self.rms((q @ self[f"{stem}.wq_b.weight"].T).reshape(-1, heads, dim)), positions)
        o = np.empty_like(q)
        for t, keys in enumerate(seen):
            scores = np.concatenate([q[t] @ keys.T * dim**-0.5, self[f"{stem}.attn_sink"][:, None]], axis=1)
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            o[t] = (weights / weights.sum(-1, keepdims=True))[:, :-1] @ keys
        o = self.rope(o, positions, -1)
        groups = self.config["o_groups"]
        wo_a = self[f"{stem}.wo_a.weight"].reshape(groups, self.config["o_lora_rank"], -1)
        z = np.einsum("tgk,gnk->tgn", o.reshape(len(x), groups, -1), wo_a)
        return z.reshape(len(x), -1) @ self[f"{stem}.wo_b.weight"].T

    def expert(self, x: Array, stem: str) -> Array:
        limit = self.config["swiglu_limit"]
        gate, up = (x @ self[f"{stem}.{name}.weight"].T for name in ("w1", "w3"))
        gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
        return (gate * sigmoid(gate) * up) @ self[f"{stem}.w2.weight"].T

    def experts(self, x: Array, stem: str) -> Array:
        s = np.sqrt(np.log1p(np.exp(x @ self[f"{stem}.gate.weight"].T)))
        y = self.expert(x, f"{stem}.shared_experts")
        for t, row in enumerate(s):
            best = np.argsort(-(row + self[f"{stem}.gate.bias"]))[: self.config["num_experts_per_tok"]]
            for index in best:
                weight = row[index] / row[best].sum() * self.config["routed_scaling_factor"]
                y[t] += weight * self.expert(x[t], f"{stem}.experts.{index}")
        return y

    def block(self, x: Array, stem: str, positions: Array, context: Array | None = None) -> Array:
        """Streams [T, n, d] behind a block of ratio 0.

        Args:
            context: DSpark's: normalised context [P + 1, d] of positions 0 to P. Each query then sees the last window
                of it and all of the block; without it, its own window.
        """
        window = self.config["sliding_window"]
        collapsed, post, comb = self.site(x, f"{stem}.hc_attn")
        inputs = self.rms(collapsed, self[f"{stem}.attn_norm.weight"])
        own = self.keys(inputs, f"{stem}.attn", positions)
        if context is None:
            seen = [own[max(0, t + 1 - window) : t + 1] for t in range(len(x))]
        else:
            before = self.keys(context, f"{stem}.attn", np.arange(len(context)))[-window:]
            seen = [np.concatenate([before, own])] * len(x)
        h = self.attention(inputs, f"{stem}.attn", positions, seen)
        x = post[:, :, None] * h[:, None] + np.einsum("tjk,tjd->tkd", comb, x)
        collapsed, post, comb = self.site(x, f"{stem}.hc_ffn")
        h = self.experts(self.rms(collapsed, self[f"{stem}.ffn_norm.weight"]), f"{stem}.ffn")
        return post[:, :, None] * h[:, None] + np.einsum("tjk,tjd->tkd", comb, x)

    def mtp(self, embedded: Array, streams: Array) -> tuple[Array, Array]:
        """(hidden states, streams) of MTP, from position 0 on."""
        e = self.rms(embedded, self["mtp.0.enorm.weight"]) @ self["mtp.0.e_proj.weight"].T
        h = self.rms(streams, self["mtp.0.hnorm.weight"]) @ self["mtp.0.h_proj.weight"].T
        y = self.block(e[:, None] + h, "mtp.0", np.arange(len(embedded)))
        return self.rms(self.collapse(y, "mtp.0.hc_head"), self["mtp.0.norm.weight"]), y

    def dspark(self, captured: Sequence[Array], embedded: Array, stages: int) -> tuple[Array, Array]:
        """(hidden states, the same before the norm) of the block behind the captured positions, which begin at 0."""
        means = np.concatenate([streams.mean(1) for streams in captured], axis=-1)
        context = self.rms(means @ self["mtp.0.main_proj.weight"].T, self["mtp.0.main_norm.weight"])
        positions = len(context) + np.arange(len(embedded))
        x = np.repeat(embedded[:, None], self.config["hc_mult"], axis=1)
        for stage in range(stages):
            x = self.block(x, f"mtp.{stage}", positions, context)
        collapsed = self.collapse(x, f"mtp.{stages - 1}.hc_head")
        return self.rms(collapsed, self[f"mtp.{stages - 1}.norm.weight"]), collapsed


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))
