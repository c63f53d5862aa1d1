"""``nvfp4-sgl build``: its arguments, and what it prints; :mod:`nvfp4_sgl.build` compiles."""

from __future__ import annotations

import argparse
import logging
import time
from pathlib import Path

from nvfp4_sgl import pushed_sums
from nvfp4_sgl.arguments import (
    add_checkpoint,
    add_json,
    add_mode,
    add_ranks,
    add_target,
    positive,
    print_json,
    target_here,
)
from nvfp4_sgl.checkpoint.verified import holds_weights, verify
from nvfp4_sgl.config import require_checkpoint
from nvfp4_sgl.draft_arguments import add_drafts, from_arguments
from nvfp4_sgl.errors import ConfigError
from nvfp4_sgl.sglang_defaults import CHUNK, REQUESTS
from nvfp4_sgl.synthetic.random_weights import verify_dummy
from nvfp4_sgl.targets.choose import mode_of
from nvfp4_sgl.targets.requirements import check_target
from nvfp4_sgl.targets.target import descriptor, words
from nvfp4_sgl.weights.parallel import TensorParallel


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``nvfp4-sgl build``."""
    add_checkpoint(parser, more=", or one with config.json alone")
    add_target(parser, [word for word in words() if descriptor(word).gpu_in])
    add_mode(parser, "config.json's, or else the target's")
    add_ranks(parser, several=True)
    parser.add_argument(
        "--output",
        type=Path,
        metavar="OUT",
        help="folder for the kernels; the machine that serves gets it in NVFP4_SGL_KERNELS=OUT"
        " (default: this user's caches, where a server here finds them by itself)",
    )
    add_json(parser)
    parser.add_argument(
        "--context-length", type=positive, metavar="TOKENS", help="tokens of the longest request (default: the model's)"
    )
    parser.add_argument(
        "--max-running-requests",
        type=positive,
        default=REQUESTS,
        metavar="N",
        help=f"requests at once (default: {REQUESTS})",
    )
    parser.add_argument(
        "--chunked-prefill-size",
        type=positive,
        default=CHUNK,
        metavar="TOKENS",
        help=f"tokens of prompts in a pass (default: {CHUNK})",
    )
    add_drafts(parser)


def run(args: argparse.Namespace) -> int:
    """Compile, and say how much and how long it took."""
    # All that can be refused is refused before torch is imported, which takes seconds.
    require_checkpoint(args.directory)
    target = args.target or target_here(None)
    if not descriptor(target).gpu_in:
        raise ConfigError("--target: expected one, since this machine has no GPU: sm_90a (Hopper) or sm_100a (B200)")
    for ranks in args.ranks:
        pushed_sums.check_asked(target=target, ranks=ranks, custom_all_reduce=True, traces=False)
    if args.output is not None and (args.output / "config.json").exists():
        raise ConfigError(f"--output {args.output}: expected a folder for kernels, found a checkpoint's; name another")
    verified = verify(args.directory) if holds_weights(args.directory) else verify_dummy(args.directory)
    mode = mode_of(target, args.mode or verified.raw.get("activation_mode"))
    context = args.context_length or verified.config.max_position_embeddings
    for ranks in args.ranks:
        TensorParallel(size=ranks).check(verified.config)
        check_target(target, verified.config, ranks, verified.inventory.storage, mode, context)
    drafts = from_arguments(args)
    round_tokens = drafts.round_tokens(verified, target, mode)

    from nvfp4_sgl.build import Serving, build

    logging.basicConfig(level=logging.INFO, format="%(message)s")
    requests, chunk = args.max_running_requests, args.chunked_prefill_size
    settings = [Serving(ranks, context, requests, chunk, mode=mode, round_tokens=round_tokens) for ranks in args.ranks]
    started = time.monotonic()
    gemms, variants = build(verified, target, settings, args.output)
    seconds = time.monotonic() - started
    if args.json:
        print_json(
            {
                "target": target,
                "mode": mode.value,
                "ranks": args.ranks,
                "round_tokens": round_tokens,
                "gemms": gemms,
                "triton_kernels": variants,
                "output": args.output and str(args.output),
                "seconds": round(seconds, 1),
            }
        )
        return 0
    where = args.output or "this user's caches"
    print(f"{gemms} GEMMs and {variants} Triton kernels for {target} are in {where}; took {seconds:.0f} s")
    return 0
