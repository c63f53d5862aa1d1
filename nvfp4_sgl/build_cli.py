"""``nvfp4-sgl build``: its arguments, and what it prints; :mod:`nvfp4_sgl.build` compiles."""

from __future__ import annotations

import argparse
import logging
import time
from pathlib import Path

from nvfp4_sgl.checkpoint.verified import holds_weights, verify, verify_dummy
from nvfp4_sgl.errors import ConfigError
from nvfp4_sgl.ops.modes import ActivationMode
from nvfp4_sgl.sglang_defaults import CHUNK, REQUESTS
from nvfp4_sgl.targets.choose import Target, detect_target, mode_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``nvfp4-sgl build``."""
    parser.add_argument("dir", type=Path, metavar="DIR", help="a checkpoint directory, or one with config.json alone")
    parser.add_argument(
        "--target", choices=("sm_90a", "sm_100a"), help="what to compile for; default: this machine's GPU"
    )
    parser.add_argument(
        "--mode",
        choices=[mode.value for mode in ActivationMode],
        help="activation_mode; default: config.json's",
    )
    parser.add_argument("--tp", type=int, nargs="+", default=[1], metavar="N", help="sizes of --tp-size (default: 1)")
    parser.add_argument(
        "--output",
        type=Path,
        metavar="OUT",
        help="where to put the kernels, for NVFP4_SGL_KERNELS=OUT on the machine that serves;"
        " default: this user's caches, where a server here finds them by itself",
    )
    parser.add_argument("--context-length", type=int, metavar="TOKENS", help="as served; default: the model's")
    parser.add_argument("--max-running-requests", type=int, default=REQUESTS, metavar="N", help=f"default: {REQUESTS}")
    parser.add_argument("--chunked-prefill-size", type=int, default=CHUNK, metavar="TOKENS", help=f"default: {CHUNK}")


def run(args: argparse.Namespace) -> int:
    """Compile, and say how much and how long it took."""
    from nvfp4_sgl.build import Serving, build

    logging.basicConfig(level=logging.INFO, format="%(message)s")
    target = Target(args.target) if args.target else detect_target()
    if target is Target.CPU:
        raise ConfigError("--target: expected one, since this machine has no GPU: sm_90a (Hopper) or sm_100a (B200)")
    verified = verify(args.dir) if holds_weights(args.dir) else verify_dummy(args.dir)
    mode = mode_of(target, args.mode or verified.raw.get("activation_mode"))
    context = args.context_length or verified.config.max_position_embeddings
    requests, chunk = args.max_running_requests, args.chunked_prefill_size
    settings = [Serving(ranks, context, requests, chunk, mode=mode) for ranks in args.tp]
    started = time.monotonic()
    gemms, variants = build(verified, target, settings, args.output)
    where = args.output or "this user's caches"
    seconds = time.monotonic() - started
    print(f"{gemms} GEMMs and {variants} Triton kernels for {target.value} are in {where}; took {seconds:.0f} s")
    return 0
