"""The benchmark behind launch/bench_serving: the served tiny model and transformers, side by side in one run.

Both run the same architecture and sizes on this CPU in fp32, with the same number of threads: the server a tiny NVFP4
checkpoint through ``/generate``, transformers the checkpoint of the same seed before quantisation, in a bare greedy
loop with its cache (no ``generate()`` around it).

transformers is measured twice: all requests as one batch, which its compressor cache allows only for prompts of equal
length, as they are here; and one request after the other, which is what it can do for requests of any length. Says
nothing about a GPU or about the real model.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import tempfile
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from programs.local_server import server

from nvfp4_sgl.synthetic.tiny import write_tiny

SEED = 1


@dataclass(frozen=True)
class Result:
    """One engine at one concurrency: seconds to the first token, and tokens/s of all requests together after it."""

    first_token: float
    decode_rate: float


def main() -> int:
    parser = argparse.ArgumentParser(prog="launch/bench_serving", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8], help="requests at once")
    parser.add_argument("--prompt", type=int, default=256, help="prompt tokens")
    parser.add_argument("--tokens", type=int, default=128, help="generated tokens")
    parser.add_argument("--repeat", type=int, default=3, help="runs, of which the median counts")
    parser.add_argument("--output", type=Path, metavar="FILE", help="also write the figures here")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="nvfp4-sgl-bench-") as name:
        folder = Path(name)
        for fmt in ("nvfp4-full", "bf16"):
            write_tiny(folder / fmt, fmt, seed=SEED)
        served, theirs = {}, {}
        with server(folder / "nvfp4-full", folder / "server.log") as url:
            for count in args.concurrency:
                served[count] = median([measure_server(url, args, count, run) for run in range(args.repeat + 1)][1:])
        model = load_transformers(folder / "bf16")
        for count in sorted({1, *args.concurrency}):
            theirs[count] = median([measure_transformers(model, args, count, run) for run in range(args.repeat)])
    show(args, served, theirs)
    return 0


def prompts(args: argparse.Namespace, count: int, run: int) -> list[list[int]]:
    """Random prompts that differ between runs, so that no prefix is cached."""
    generator = torch.Generator().manual_seed(1000 * count + run)
    return torch.randint(25, 500, (count, args.prompt), generator=generator).tolist()


def median(results: list[Result]) -> Result:
    return Result(
        statistics.median(result.first_token for result in results),
        statistics.median(result.decode_rate for result in results),
    )


def measure_server(url: str, args: argparse.Namespace, count: int, run: int) -> Result:
    """All requests at once, streamed; the first token is that of the last request to get one."""

    def stream(ids: list[int]) -> tuple[float, float]:
        sampling = {"temperature": 0, "max_new_tokens": args.tokens, "ignore_eos": True}
        body = json.dumps({"input_ids": ids, "stream": True, "sampling_params": sampling}).encode()
        request = urllib.request.Request(f"{url}/generate", body, {"Content-Type": "application/json"})
        first, tokens = 0.0, 0
        with urllib.request.urlopen(request, timeout=600) as answer:
            for line in answer:
                if line.startswith(b"data: {"):
                    first = first or time.monotonic()
                    tokens = json.loads(line[6:])["meta_info"]["completion_tokens"]
        if tokens != args.tokens:
            raise RuntimeError(f"expected {args.tokens} tokens, found {tokens}")
        return first, time.monotonic()

    with ThreadPoolExecutor(count) as threads:
        started = time.monotonic()
        times = list(threads.map(stream, prompts(args, count, run)))
    first, last = max(first for first, _ in times), max(last for _, last in times)
    return Result(first - started, count * (args.tokens - 1) / (last - first))


def load_transformers(path: Path) -> Any:
    from transformers import DeepseekV4ForCausalLM

    model = DeepseekV4ForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    return model.float().eval()


@torch.no_grad()
def measure_transformers(model: Any, args: argparse.Namespace, count: int, run: int) -> Result:
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    ids = torch.tensor(prompts(args, count, run))
    started = time.monotonic()
    token = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1:].argmax(-1)
    first = time.monotonic()
    for _ in range(args.tokens - 1):
        token = model(token, past_key_values=cache, use_cache=True).logits[:, -1:].argmax(-1)
    return Result(first - started, count * (args.tokens - 1) / (time.monotonic() - first))


def show(args: argparse.Namespace, served: dict[int, Result], theirs: dict[int, Result]) -> None:
    print(
        f"\ntiny model, fp32, {cpu_name()}, {torch.get_num_threads()} threads,"
        f" prompt {args.prompt}, {args.tokens} tokens, median of {args.repeat}; {time.strftime('%Y-%m-%d')}"
    )
    print(f"{'':<13}{'time to first token, s':^32}   {'decode, tokens/s':^54}")
    print(f"{'':<13}{'':>8}{'transformers':>22}     {'':>8}{'transformers':>44}")
    print(f"{'concurrency':<13}{'served':>8}{'one batch':>14}{'ratio':>8}  ", end="")
    print(f"{'served':>10}{'one batch':>14}{'ratio':>8}{'in turn':>12}{'ratio':>8}")
    alone, rows = theirs[1].decode_rate, []
    for count, ours in served.items():
        peer = theirs[count]
        faster = peer.first_token / ours.first_token
        print(
            f"{count:<13}{ours.first_token:>8.2f}{peer.first_token:>14.2f}{faster:>7.1f}x  "
            f"{ours.decode_rate:>10.1f}{peer.decode_rate:>14.1f}{ours.decode_rate / peer.decode_rate:>7.1f}x"
            f"{alone:>12.1f}{ours.decode_rate / alone:>7.1f}x"
        )
        rows.append({"concurrency": count, "served": vars(ours), "transformers": vars(peer)})
    if args.output:
        args.output.write_text(json.dumps({"prompt": args.prompt, "tokens": args.tokens, "rows": rows}, indent=1))


def cpu_name() -> str:
    """The CPU's model name where Linux tells it."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


if __name__ == "__main__":
    sys.exit(main())
