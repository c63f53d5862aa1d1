"""A planned server: the flags that its memory depends on, by SGLang's names, and their defaults."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from nvfp4_sgl import prompt_sizes, pushed_sums
from nvfp4_sgl.arguments import add_ranks, add_target, whole_number
from nvfp4_sgl.cache.layout import PAGE_TOKENS
from nvfp4_sgl.checkpoint.drafts import Draft
from nvfp4_sgl.draft_arguments import add_drafts
from nvfp4_sgl.errors import ConfigError
from nvfp4_sgl.memory.setting import Setting
from nvfp4_sgl.sglang_defaults import (
    CHUNK,
    CPU_DEFAULTS,
    CPU_SWA_RATIO,
    DRAFT_STEPS,
    FRACTION,
    PACKED_SWA_RATIO,
    REQUESTS,
)
from nvfp4_sgl.targets.target import descriptor

if TYPE_CHECKING:
    from nvfp4_sgl.config import ModelConfig

MAX_GPU_GIB = 4096
MAX_REQUESTS = 1 << 20
GPU_DTYPE_BYTES = 2
"""Bytes of an element of bfloat16, the model's dtype on a GPU."""


FLAGS = {
    "ranks": "--tp",
    "gpu_memory": "--gpu-memory",
    "requests": "--max-running-requests",
    "context": "--context-length",
    "fraction": "--mem-fraction-static",
    "kv_cache_dtype": "--kv-cache-dtype",
    "chunk": "--chunked-prefill-size",
    "algorithm": "--speculative-algorithm",
    "steps": "--speculative-num-steps",
    "block": "--speculative-dspark-block-size",
}
"""The flag of ``nvfp4-sgl doctor`` for each field of :class:`ServerFlags` that needs a checkpoint."""


@dataclass(frozen=True)
class ServerFlags:
    """The flags of a planned server; ``None`` is the default.

    Attributes:
        ranks: ``--tp-size``.
        target: by name; this machine's if ``None``.
        gpu_memory: GiB that are free on each GPU before the server starts.
        requests, context, fraction, kv_cache_dtype: ``--max-running-requests``, ``--context-length``,
            ``--mem-fraction-static``, ``--kv-cache-dtype``.
        chunk: ``--chunked-prefill-size``.
        algorithm, steps, block: ``--speculative-algorithm``, ``--speculative-num-steps``,
            ``--speculative-dspark-block-size``.
    """

    ranks: int = 1
    target: str | None = None
    gpu_memory: float | None = None
    requests: int | None = None
    context: int | None = None
    fraction: float | None = None
    kv_cache_dtype: str = "auto"
    chunk: int | None = None
    algorithm: str | None = None
    steps: int | None = None
    block: int | None = None

    def given(self) -> list[str]:
        """The flags of :data:`FLAGS` that are not left at their default."""
        default = ServerFlags()
        return [flag for name, flag in FLAGS.items() if getattr(self, name) != getattr(default, name)]

    def setting(self, target: str, config: ModelConfig, draft: Draft | None = None) -> Setting:
        """The forecast's setting on ``target``.

        Args:
            draft: what :attr:`algorithm` drafts with.

        Raises:
            ConfigError: a flag that ``target`` or the model does not take, with what it takes; or a wrong value of
                ``NVFP4_SGL_PROMPT_GRAPHS`` or ``NVFP4_SGL_PUSHED_SUMS``.
        """
        taken = descriptor(target).kv_cache_dtypes
        if self.kv_cache_dtype not in taken:
            raise ConfigError(f"--kv-cache-dtype {self.kv_cache_dtype}: expected one of {', '.join(taken)} on {target}")
        longest = config.max_position_embeddings
        if self.context is not None and self.context > longest:
            raise ConfigError(
                f"--context-length {self.context}: expected 1 to {longest}, config.json's max_position_embeddings"
            )
        if self.chunk is not None and self.chunk % PAGE_TOKENS:
            raise ConfigError(
                f"--chunked-prefill-size {self.chunk}: expected a multiple of {PAGE_TOKENS}, the tokens of a page"
            )
        setting = self._on_gpu(longest) if descriptor(target).on_gpu else self._on_cpu(longest)
        setting = replace(setting, pushed_tokens=pushed_sums.planned_tokens(target=target, ranks=self.ranks))
        if draft is None:
            return setting
        guesses = self.block or draft.block or self.steps or DRAFT_STEPS
        return replace(setting, draft=draft.kind, round_tokens=guesses + 1)

    def _on_gpu(self, longest: int) -> Setting:
        return Setting(
            self.ranks,
            requests=self.requests or REQUESTS,
            context=self.context or longest,
            chunk=self.chunk or CHUNK,
            dtype_bytes=GPU_DTYPE_BYTES,
            row_bytes=None,
            swa_ratio=PACKED_SWA_RATIO,
            fraction=self.fraction or FRACTION,
            window_by_ratio=self.requests is None,
            prompt_tokens=prompt_sizes.planned(self.chunk or CHUNK),
        )

    def _on_cpu(self, longest: int) -> Setting:
        if self.gpu_memory is not None:
            raise ConfigError("--gpu-memory: the target is cpu, which has none; name a GPU's with --target")
        return Setting(
            self.ranks,
            requests=self.requests or CPU_DEFAULTS["max_running_requests"],
            context=self.context or longest,
            chunk=self.chunk or CPU_DEFAULTS["chunked_prefill_size"],
            dtype_bytes=4,
            row_bytes={"auto": 4, "bfloat16": 2}.get(self.kv_cache_dtype),
            swa_ratio=CPU_SWA_RATIO,
            fraction=self.fraction or CPU_DEFAULTS["mem_fraction_static"],
            most_tokens=CPU_DEFAULTS["max_total_tokens"],
        )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of a :class:`ServerFlags`."""
    group = parser.add_argument_group("the server whose memory is forecast")
    add_ranks(group)
    add_target(group, more="; what is free on another is unknown, unless --gpu-memory says so")
    group.add_argument(
        "--gpu-memory",
        type=number_up_to(MAX_GPU_GIB),
        metavar="GIB",
        help="GiB free on each GPU before it starts; this machine's if not given",
    )
    group.add_argument(
        "--max-running-requests",
        type=whole_number(MAX_REQUESTS),
        metavar="N",
        dest="requests",
        help=f"requests at once (default: {REQUESTS} on a GPU)",
    )
    group.add_argument(
        "--context-length",
        type=whole_number(1 << 30),
        metavar="TOKENS",
        dest="context",
        help="tokens of the longest request (default: the model's)",
    )
    group.add_argument(
        "--mem-fraction-static",
        type=number_up_to(1),
        metavar="SHARE",
        dest="fraction",
        help=f"share of free memory that weights and pools may take (default: {FRACTION} on a GPU)",
    )
    group.add_argument(
        "--chunked-prefill-size",
        type=whole_number(1 << 30),
        metavar="TOKENS",
        dest="chunk",
        help=f"tokens of prompts in a pass (default: {CHUNK} on a GPU)",
    )
    group.add_argument("--kv-cache-dtype", default="auto", metavar="DTYPE", help="dtype of cache rows (default: auto)")
    add_drafts(group)


def from_arguments(args: argparse.Namespace) -> ServerFlags:
    """The plan that the flags of :func:`add_arguments` give."""
    return ServerFlags(
        args.ranks,
        target=args.target,
        gpu_memory=args.gpu_memory,
        requests=args.requests,
        context=args.context,
        fraction=args.fraction,
        kv_cache_dtype=args.kv_cache_dtype,
        chunk=args.chunk,
        algorithm=args.algorithm,
        steps=args.steps,
        block=args.block,
    )


def number_up_to(most: float) -> Callable[[str], float]:
    """An argparse type: more than 0 and at most ``most``."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = 0.0
        if 0 < value <= most:
            return value
        raise argparse.ArgumentTypeError(f"expected a number above 0 and up to {most}, found '{text}'")

    return parse
