"""The demo behind launch/demo: serves a small trained model with SGLang and asks it questions with known answers.

With --format it writes a tiny checkpoint with random weights instead, whose answers mean nothing. Run through
launch/demo, which sets up the environment first. Exit status 0 only if the trained model's answers were right, or
those of the random one came back whole.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from openai import OpenAI, OpenAIError
from small_model.task import ANSWER_OFFSET, CHANCE, MEASURED_KEYS, MEASURED_TOKENS, far_document

from programs.draft_rounds import Rounds
from programs.local_server import ServerError, server, tail

TRAINED = Path(__file__).resolve().parents[2] / "examples" / "small_model"
"""The checkpoint that launch/train_small made; it bundles an MTP block."""
DRAFTED = {"mtp": (TRAINED, "EAGLE"), "dspark": (TRAINED.with_name("small_model_dspark"), "DSPARK")}
"""The checkpoint that bundles a draft, and the value of --speculative-algorithm that asks for it."""
QUESTIONS, DOCUMENT_SEED = 8, 7
MUST_BE_RIGHT = 7
"""Least right answers of ``QUESTIONS``: the model misses 2 or 3 of 100 (launch/results/small_model.md)."""
SHORT_PROMPT = "a=7;b=3;k=5;?a"
"""For the emulator, which takes seconds a token: the answer is 7."""
FORMATS = ("nvfp4-full", "nvfp4-experts", "bf16")
PROMPT = "Which number format keeps sixteen values and one scale in nine bytes?"
MAX_TOKENS = 48
ANSWER_SECONDS = 600
"""Ample: a busy machine takes seconds a round of draft and verify."""
WRITTEN = 32
"""Tokens of the text that is written in rounds of draft and verify."""


FLAGS = ("--constrained-json-disable-any-whitespace",)
"""A model that knows no JSON writes whitespace without end where a grammar lets it: examples/function_calling.py."""


class DemoError(Exception):
    """A step failed; the message says which, and what to look at."""


@dataclass
class Timings:
    """Seconds of each step, in order."""

    rows: list[tuple[str, str]] = field(default_factory=list)

    def add(self, step: str, seconds: float, note: str = "") -> None:
        self.rows.append((step, f"{seconds:8.2f} s{note}"))

    def show(self) -> None:
        print("\n== timings (on this machine, a toy: no measure of the real model)")
        for step, text in self.rows:
            print(f"{step:<28} {text}")


def main() -> int:
    args = parse_arguments()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # stop the server then, too
    timings = Timings()
    timings.add("environment", args.environment_seconds)
    with folder(args.output) as directory:
        try:
            trained, flags = served(args.draft)
            checkpoint = trained if args.format is None else directory / f"tiny-{args.format}"
            if args.format is not None:
                make_checkpoint(checkpoint, args.format, timings)
            if args.target == "sm_100a":
                return emulate(checkpoint)
            log, started = directory / "server.log", time.monotonic()
            with server(checkpoint, log, args.port, flags) as url:
                timings.add("server start", time.monotonic() - started)
                try:
                    if args.format is None:
                        text = recall(url, timings)
                        if args.draft != "none":
                            write_on(url, text, timings)
                    else:
                        ask(url, timings)
                except DemoError as error:
                    raise DemoError(f"{error}\n--- last lines of {log.name}\n{tail(log)}") from error
                timings.show()
                if args.keep:
                    print(f"\nserving {url}/v1 (log: {log}) until Ctrl-C")
                    signal.pause()
        except (DemoError, ServerError) as error:
            print(f"\ndemo: {error}", file=sys.stderr)
            return 1
    return 0


def served(draft: str) -> tuple[Path, tuple[str, ...]]:
    """The trained checkpoint to serve, and the server's flags."""
    if draft == "none":
        return TRAINED, FLAGS
    checkpoint, algorithm = DRAFTED[draft]
    return checkpoint, (*FLAGS, "--speculative-algorithm", algorithm)


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="launch/demo", description="Serve a small DeepSeek-V4 and question it.")
    parser.add_argument(
        "--format",
        choices=FORMATS,
        help="a tiny checkpoint in this format, with random weights (default: the trained one in examples/small_model)",
    )
    parser.add_argument(
        "--target",
        choices=("sm_100a",),
        help="no server; the decoder as a B200 runs it, executed in the emulator, beside the CPU reference",
    )
    parser.add_argument(
        "--draft",
        choices=("none", "mtp", "dspark"),
        default="none",
        help="let this draft guess tokens, and show how many a round gives (default: %(default)s)",
    )
    parser.add_argument("--port", type=int, default=0, help="server port (default: a free one)")
    parser.add_argument(
        "--output",
        type=Path,
        metavar="OUT",
        help="put checkpoint and log here and leave them (default: a folder that goes)",
    )
    parser.add_argument("--keep", action="store_true", help="go on serving after the answers, until Ctrl-C")
    parser.add_argument("--environment-seconds", type=float, default=0.0, help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.target == "sm_100a" and args.format not in (None, FORMATS[0]):
        parser.error(f"--target sm_100a runs full-NVFP4 checkpoints: expected --format {FORMATS[0]}, or none")
    if args.draft != "none":
        if args.format is not None or args.target is not None:
            other = "--target" if args.format is None else "--format"
            parser.error(f"--draft {args.draft} shows a trained draft behind a server: leave out {other}")
        checkpoint, _ = DRAFTED[args.draft]
        if not (checkpoint / "config.json").is_file():
            remedy = f"launch/train_small --output OUT --drafts-of {TRAINED} writes OUT/{args.draft}: copy it there"
            parser.error(f"--draft {args.draft}: expected a checkpoint in {checkpoint}, found none; {remedy}")
    return args


@contextmanager
def folder(chosen: Path | None) -> Iterator[Path]:
    """The folder for checkpoint and log: ``chosen``, or a temporary one."""
    if chosen is not None:
        chosen.mkdir(parents=True, exist_ok=True)
        yield chosen.resolve()
        return
    with tempfile.TemporaryDirectory(prefix="nvfp4-sgl-demo-") as name:
        yield Path(name)


def make_checkpoint(checkpoint: Path, fmt: str, timings: Timings) -> None:
    """Write the tiny checkpoint, or keep the one that an earlier run left there."""
    if (checkpoint / "config.json").is_file():
        print(f"== checkpoint: {checkpoint} is there already")
        return
    print(f"== checkpoint: nvfp4-sgl tiny {checkpoint} --format {fmt}", flush=True)
    started = time.monotonic()
    command = [sys.executable, "-m", "nvfp4_sgl.cli", "tiny", str(checkpoint), "--format", fmt, "--no-check"]
    if subprocess.run(command, check=False).returncode != 0:
        raise DemoError(f"writing the checkpoint failed: {' '.join(command)}")
    timings.add("checkpoint", time.monotonic() - started)


def emulate(checkpoint: Path) -> int:
    """Answer a prompt with SM100's decoder in the emulator; Triton's interpreter needs a process of its own."""
    script = Path(__file__).with_name("demo_sm100.py")
    environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    asked = ["--prompt", SHORT_PROMPT, "--tokens", "2"] if checkpoint == TRAINED else []
    return subprocess.run([sys.executable, str(script), str(checkpoint), *asked], env=environment).returncode


def recall(url: str, timings: Timings) -> str:
    """Give the trained model a document, ask for values that stand in it far before, and check the answers.

    Returns the document.
    """
    client = OpenAI(base_url=f"{url}/v1", api_key="none", timeout=ANSWER_SECONDS, max_retries=0)
    document = far_document(random.Random(DOCUMENT_SEED), MEASURED_TOKENS, MEASURED_KEYS, QUESTIONS)
    first = document.answers[0] - ANSWER_OFFSET
    print(
        f"== {MEASURED_TOKENS} tokens: facts such as 'a=7;' in noise, then noise alone for more than a window,"
        " then questions"
    )
    print(document.text[:first])
    started, right = time.monotonic(), 0
    try:
        model = client.models.list().data[0].id
        for place in document.answers:
            key, expected = document.text[place - 1], document.text[place]
            # The questions before this one, with the right answers, stand in the prompt as in training.
            answer = client.completions.create(model=model, prompt=document.text[:place], max_tokens=1, temperature=0)
            given, distance = answer.choices[0].text, place - document.text.index(f"{key}={expected};")
            right += given == expected
            verdict = "right" if given == expected else f"wrong: it is {expected}"
            print(f"?{key} -> {given}   {verdict} (the fact is {distance} tokens back, the window 128)")
    except OpenAIError as error:
        raise DemoError(f"the request failed: {error}") from error
    print(f"{right} of {QUESTIONS} right; guessing would give {QUESTIONS * CHANCE:.1f}")
    timings.add(f"{QUESTIONS} answers", time.monotonic() - started, f"  {MEASURED_TOKENS} tokens in, 1 out each")
    if right < MUST_BE_RIGHT:
        raise DemoError(f"expected at least {MUST_BE_RIGHT} right answers, found {right}")
    return document.text


def write_on(url: str, text: str, timings: Timings) -> None:
    """Let the model write behind ``text`` and show what its draft's guesses gave."""
    client = OpenAI(base_url=f"{url}/v1", api_key="none", timeout=ANSWER_SECONDS, max_retries=0)
    rounds, started = Rounds(), time.monotonic()
    try:
        answer = client.completions.create(
            model=client.models.list().data[0].id,
            prompt=text,
            max_tokens=WRITTEN,
            temperature=0,
            extra_body={"ignore_eos": True, "return_spec_tokens_details": True},
        )
    except OpenAIError as error:
        raise DemoError(f"the request failed: {error}") from error
    rounds.add_answer(answer.model_dump())
    print(f"== {WRITTEN} tokens behind them, guessed by the draft and verified\n{answer.choices[0].text}")
    if not rounds.count:
        raise DemoError(f"expected rounds of draft and verify, found none in {answer}")
    print(rounds.line())
    timings.add(f"{WRITTEN} drafted tokens", time.monotonic() - started, f"  {rounds.tokens:.2f} a round")


def ask(url: str, timings: Timings) -> None:
    """One chat completion and one streamed completion; print answers, add timings."""
    client = OpenAI(base_url=f"{url}/v1", api_key="none", timeout=ANSWER_SECONDS, max_retries=0)
    try:
        model = client.models.list().data[0].id
        chat(client, model, timings)
        stream(client, model, timings)
    except OpenAIError as error:
        raise DemoError(f"the request failed: {error}") from error


def chat(client: OpenAI, model: str, timings: Timings) -> None:
    started = time.monotonic()
    answer = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": PROMPT}],
        max_tokens=MAX_TOKENS,
        temperature=0,
    )
    seconds = time.monotonic() - started
    choice, usage = answer.choices[0], answer.usage
    if usage is None or usage.completion_tokens < 1:
        raise DemoError(f"the chat completion holds no token: {answer}")
    print(f"== chat completion (random weights: expect no sense)\nuser:      {PROMPT}")
    print(f"assistant: {choice.message.content!r}\n({usage.completion_tokens} tokens, {choice.finish_reason})")
    timings.add("first answer", seconds, f"  {usage.prompt_tokens} tokens in, {usage.completion_tokens} out")


def stream(client: OpenAI, model: str, timings: Timings) -> None:
    print(f"== streamed completion\n{PROMPT!r} -> ", end="", flush=True)
    started = time.monotonic()
    first, finished, tokens = None, None, 0
    for chunk in client.completions.create(
        model=model,
        prompt=PROMPT,
        max_tokens=MAX_TOKENS,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    ):
        if chunk.usage is not None:
            tokens = chunk.usage.completion_tokens
        for choice in chunk.choices:
            first = first or time.monotonic()
            finished = choice.finish_reason or finished
            print(repr(choice.text)[1:-1], end="", flush=True)
    ended = time.monotonic()
    print(f"\n({tokens} tokens, {finished})")
    if first is None or finished is None or tokens != MAX_TOKENS:
        raise DemoError(f"the stream ended early: {tokens} of {MAX_TOKENS} tokens, finish reason {finished}")
    timings.add("stream, first token", first - started)
    timings.add(
        "stream, all tokens", ended - started, f"  {(tokens - 1) / (ended - first):.1f} tokens/s after the first"
    )


if __name__ == "__main__":
    sys.exit(main())
