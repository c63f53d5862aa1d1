"""Measures how far a server's answers are from another's, and how many questions it answers: behind launch/evaluate.

``record`` keeps what a server says of texts: the log-probability of every token, and of the likeliest ones at every
position. ``compare`` feeds another server the same tokens and states KL divergence, agreement of the likeliest token
and perplexity: so a quantised checkpoint can be judged without both models loaded at once. ``questions`` scores a file
of questions; of a server that drafts it also says how many tokens a round of draft and verify gave.

A server returns the N likeliest tokens only. KL is taken over those that both name, all others merged into one. Merging
never raises a KL divergence, so what is stated is a lower bound, near the true one if little is merged (it says how
much is).
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import re
import statistics
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from programs.draft_rounds import Rounds

FORMAT = 1
"""Version of the dump's format."""
TIMEOUT_SECONDS = 600
WORST = 5
"""Positions of the largest divergence that are named."""
Z = 1.96
"""Normal quantile of a 95 % interval."""
Item = TypeVar("Item")
Result = TypeVar("Result")


class EvaluationError(Exception):
    """The server or a file is not as expected; the message says what to do."""


def post(url: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """A JSON request; :class:`EvaluationError` with the server's words if it refuses."""
    data = json.dumps(body).encode()
    request = urllib.request.Request(f"{url.rstrip('/')}{path}", data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        raise EvaluationError(
            f"{url}{path}: HTTP {error.code}: {error.read().decode(errors='replace')[:500]}"
        ) from None
    except OSError as error:
        raise EvaluationError(f"{url}: no answer ({error}); is the server up?") from None


def model_of(url: str) -> str:
    try:
        with urllib.request.urlopen(f"{url.rstrip('/')}/v1/models", timeout=60) as answer:
            return str(json.load(answer)["data"][0]["id"])
    except (OSError, LookupError, ValueError) as error:
        raise EvaluationError(f"{url}/v1/models: expected a model's name ({error}); is the server up?") from None


def drafts(url: str) -> bool:
    """Whether it is an SGLang server that drafts; others have no such information, or keep it to themselves."""
    try:
        with urllib.request.urlopen(f"{url.rstrip('/')}/server_info", timeout=60) as answer:
            return json.load(answer).get("speculative_algorithm") is not None
    except (OSError, ValueError, AttributeError):
        return False


@dataclass(frozen=True)
class Scored:
    """A server's log-probabilities of a text.

    Attributes:
        ids: its tokens. logprobs: of each but the first, given those before it.
        top: at each position but the first the likeliest tokens with their log-probabilities, best first.
    """

    ids: list[int]
    logprobs: list[float]
    top: list[list[tuple[int, float]]]


def score(url: str, top: int, text: str | Sequence[int]) -> Scored:
    """Ask a server about a text, or about tokens."""
    given = {"text": text} if isinstance(text, str) else {"input_ids": list(text)}
    options = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": top}
    sampling = {"temperature": 0, "max_new_tokens": 1}
    meta = post(url, "/generate", {**given, **options, "sampling_params": sampling})["meta_info"]
    tokens, likeliest = meta["input_token_logprobs"], meta["input_top_logprobs"]
    ids = [token for _, token, *_ in tokens] if isinstance(text, str) else list(text)
    logprobs = [value for value, *_ in tokens[1:]]
    found = [[(token, value) for value, token, *_ in position] for position in likeliest[1:]]
    if len(ids) != len(tokens) or len(found) != len(ids) - 1:
        raise EvaluationError(f"{url}: expected log-probabilities of {len(ids)} tokens, found {len(tokens)}")
    values = [*logprobs, *(value for position in found for _, value in position)]
    if not all(isinstance(value, float | int) and math.isfinite(value) for value in values):
        raise EvaluationError(f"{url}: a log-probability is not finite: the model computes NaN or infinities")
    return Scored(ids, logprobs, found)


def in_order(work: Callable[[Item], Result], items: Sequence[Item], threads: int) -> Iterator[Result]:
    """``work`` of each item, several at a time, with progress on stderr."""
    shown = time.monotonic()
    with ThreadPoolExecutor(threads) as pool:
        for number, result in enumerate(pool.map(work, items), start=1):
            if time.monotonic() - shown > 5:
                shown = time.monotonic()
                print(f"{number} of {len(items)}", file=sys.stderr, flush=True)
            yield result


def read_texts(path: Path) -> list[str]:
    """Texts of a file: a field ``text`` of each line of .jsonl, else its lines; blank ones are left out."""
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    if path.suffix == ".jsonl":
        lines = [str(entry["text"]) for entry in read_objects(path, ["text"])]
    if not lines:
        raise EvaluationError(f"{path}: expected texts, found none")
    return lines


def read_objects(path: Path, fields: Iterable[str]) -> list[dict[str, Any]]:
    """The objects of a .jsonl file, each with these fields."""
    found = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except ValueError as error:
            raise EvaluationError(f"{path}:{number}: expected a JSON object, found no JSON ({error})") from None
        missing = [field for field in fields if not isinstance(entry, dict) or field not in entry]
        if missing:
            raise EvaluationError(f"{path}:{number}: expected a JSON object with '{missing[0]}', found {line[:80]}")
        found.append(entry)
    return found


def record(url: str, texts: Path, dump: Path, top: int, threads: int) -> None:
    """Write what the server says of each text to ``dump``, gzipped JSON lines."""
    inputs = read_texts(texts)
    head = {"format": FORMAT, "top": top, "model": model_of(url), "texts": len(inputs)}
    count = 0
    partial = dump.with_name(f"{dump.name}.partial")
    with gzip.open(partial, "wt", encoding="utf-8") as file:
        file.write(json.dumps(head) + "\n")
        for scored in in_order(lambda text: score(url, top, text), inputs, threads):
            count += len(scored.logprobs)
            file.write(json.dumps(asdict(scored)) + "\n")
    partial.replace(dump)
    print(f"{dump}: {len(inputs)} texts, {count} predicted tokens of {head['model']}, the {top} likeliest at each")


def read_dump(path: Path) -> tuple[dict[str, Any], list[Scored]]:
    """The head of a dump and what it holds of each text."""
    try:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            head, *lines = [json.loads(line) for line in file]
        entries = [
            Scored(line["ids"], line["logprobs"], [[(i, v) for i, v in position] for position in line["top"]])
            for line in lines
        ]
        complete = head["format"] == FORMAT and len(entries) == head["texts"]
    except (OSError, EOFError, ValueError, LookupError, TypeError) as error:
        raise EvaluationError(f"{path}: expected a dump that 'record' wrote ({error})") from None
    if not complete:
        raise EvaluationError(f"{path}: expected {head['texts']} texts of format {FORMAT}, found {len(entries)}")
    return head, entries


def divergence(theirs: Sequence[tuple[int, float]], ours: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """KL(theirs, ours) in nats, with all tokens merged that not both name; and the mass of theirs that is merged."""
    known = dict(ours)
    both = [(value, known[token]) for token, value in theirs if token in known]
    kl = sum(math.exp(p) * (p - q) for p, q in both)
    rest_p, rest_q = (max(0.0, 1.0 - sum(math.exp(pair[side]) for pair in both)) for side in (0, 1))
    if rest_p > 0:
        # Both sides' roundings may leave nothing of the second: then as little as fp32 tells from nothing.
        kl += rest_p * math.log(rest_p / max(rest_q, 2.0**-24))
    return max(kl, 0.0), rest_p


@dataclass(frozen=True)
class Comparison:
    """``kl`` in nats a token: mean, median and 99 % quantile; ``worst``: text, position and KL of the largest."""

    tokens: int
    kl_mean: float
    kl_median: float
    kl_99: float
    merged: float
    same_top: float
    perplexity_recorded: float
    perplexity_here: float
    worst: list[tuple[int, int, float]]

    def lines(self) -> list[str]:
        worst = ", ".join(f"text {text} token {place}: {kl:.3g}" for text, place, kl in self.worst)
        return [
            f"predicted tokens            {self.tokens}",
            f"KL(recorded, here), nats    mean {self.kl_mean:.3g}, median {self.kl_median:.3g}, 99 % {self.kl_99:.3g}",
            f"merged into one (mean mass) {self.merged:.2%}",
            f"same likeliest token        {self.same_top:.2%}",
            f"perplexity                  recorded {self.perplexity_recorded:.4g}, here {self.perplexity_here:.4g}",
            f"largest KL                  {worst}",
        ]


def compare(recorded: Sequence[Scored], here: Sequence[Scored]) -> Comparison:
    """Compare a server with a record, on the same tokens."""
    kls: list[tuple[float, int, int]] = []
    merged, same, theirs, ours = [], [], [], []
    for text, (one, other) in enumerate(zip(recorded, here, strict=True)):
        theirs += one.logprobs
        ours += other.logprobs
        for place, (p, q) in enumerate(zip(one.top, other.top, strict=True), start=1):
            kl, rest = divergence(p, q)
            kls.append((kl, text, place))
            merged.append(rest)
            same.append(p[0][0] == q[0][0])
    if not kls:
        raise EvaluationError("expected texts of at least two tokens, found none")
    values = sorted(kl for kl, _, _ in kls)
    return Comparison(
        len(kls),
        statistics.fmean(values),
        statistics.median(values),
        values[min(len(values) - 1, len(values) * 99 // 100)],
        statistics.fmean(merged),
        statistics.fmean(same),
        math.exp(-statistics.fmean(theirs)),
        math.exp(-statistics.fmean(ours)),
        [(text, place, kl) for kl, text, place in sorted(kls, reverse=True)[:WORST]],
    )


def is_right(question: dict[str, Any], reply: str) -> bool:
    """Whether a reply holds the answer as words of their own, or matches ``pattern`` if the question has one."""
    if "pattern" in question:
        return re.search(question["pattern"], reply) is not None
    return re.search(rf"(?<!\w){re.escape(str(question['answer']))}(?!\w)", reply, re.IGNORECASE) is not None


def interval(right: int, count: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share."""
    share = right / count
    centre, half = share + Z * Z / (2 * count), Z * math.sqrt(share * (1 - share) / count + Z * Z / (4 * count * count))
    return (centre - half) / (1 + Z * Z / count), (centre + half) / (1 + Z * Z / count)


def questions(url: str, path: Path, tokens: int, threads: int) -> dict[str, Any]:
    """Ask every question greedily; how many replies are right, with all of them, and rounds of a server that drafts."""
    asked = read_objects(path, ["question"])
    for number, entry in enumerate(asked, start=1):
        if not {"answer", "pattern"} & set(entry):
            raise EvaluationError(f"{path}: question {number}: expected 'answer' or 'pattern', found {sorted(entry)}")
    if not asked:
        raise EvaluationError(f"{path}: expected questions, found none")
    model, rounds = model_of(url), Rounds() if drafts(url) else None

    def ask(entry: dict[str, Any]) -> dict[str, Any]:
        messages = [{"role": "user", "content": entry["question"]}]
        body = {"model": model, "messages": messages, "temperature": 0, "max_tokens": tokens}
        if rounds is not None:
            body["return_spec_tokens_details"] = True
        return post(url, "/v1/chat/completions", body)

    answers = list(in_order(ask, asked, threads))
    replies = [answer["choices"][0]["message"]["content"] or "" for answer in answers]
    marks = [is_right(entry, reply) for entry, reply in zip(asked, replies, strict=True)]
    low, high = interval(sum(marks), len(marks))
    print(f"{model}: {sum(marks)} of {len(marks)} right, {sum(marks) / len(marks):.1%} (95 %: {low:.1%} to {high:.1%})")
    if rounds is not None:
        for answer in answers:
            rounds.add_answer(answer)
        print(f"drafts: {rounds.line()}")
    pairs = zip(asked, replies, marks, strict=True)
    return {
        "model": model,
        "right": sum(marks),
        "questions": len(marks),
        "drafts": rounds and rounds.as_json(),
        "replies": [{**entry, "reply": reply, "right": mark} for entry, reply, mark in pairs],
    }


def describe(error: Exception) -> str:
    """An error as one line; of a file, its name and what is wrong with it."""
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return str(error)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="launch/evaluate", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("url", help="address of a running server, e.g. http://127.0.0.1:30000")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="record|compare|questions")
    keep = verbs.add_parser("record", help="keep log-probabilities of texts")
    keep.add_argument("texts", type=Path, help="record: a text a line, or .jsonl with a field 'text'")
    keep.add_argument("dump", type=Path, help="record: where to write log-probabilities, gzipped JSON lines")
    keep.add_argument("--top", type=int, default=64, help="likeliest tokens kept at each position (default: 64)")
    against = verbs.add_parser("compare", help="state how far this server is from what was recorded")
    against.add_argument("dump", type=Path, help="compare: what record wrote")
    against.add_argument("--max-kl", type=float, help="exit with 1 if the mean KL is larger")
    ask = verbs.add_parser("questions", help="score a file of questions")
    ask.add_argument("file", type=Path, help="questions: .jsonl with 'question', and 'answer' or 'pattern'")
    ask.add_argument("--max-tokens", type=int, default=512, help="tokens of an answer (default: 512)")
    for verb in (keep, against, ask):
        verb.add_argument("--concurrency", type=int, default=8, help="requests at once (default: 8)")
        verb.add_argument("--output", type=Path, metavar="FILE", help="also write the result here, as JSON")
    args = parser.parse_args(arguments)
    try:
        report: Any = None
        if args.verb == "record":
            record(args.url, args.texts, args.dump, args.top, args.concurrency)
        elif args.verb == "questions":
            report = questions(args.url, args.file, args.max_tokens, args.concurrency)
        else:
            head, recorded = read_dump(args.dump)
            here = list(in_order(lambda one: score(args.url, head["top"], one.ids), recorded, args.concurrency))
            found = compare(recorded, here)
            print(f"recorded: {head['model']}; here: {model_of(args.url)}", *found.lines(), sep="\n")
            report = asdict(found)
        if args.output:
            args.output.write_text(json.dumps(report, indent=1) + "\n")
        if args.verb == "compare" and args.max_kl is not None and report["kl_mean"] > args.max_kl:
            print(f"WRONG: mean KL {report['kl_mean']:.3g} is larger than {args.max_kl:g}")
            return 1
    except (EvaluationError, OSError) as error:
        print(f"launch/evaluate: error: {describe(error)}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
