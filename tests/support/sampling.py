"""What a server's sampling must keep to, on a CPU and on a GPU: judged by the log-probabilities that it returns."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from tests.support.server import Server

DRAWS = 48
TIED = 1e-3
"""Log-probabilities of one pass as near as this may fall on either side of a bound."""


def ask(server: Server, prompts: Sequence[Sequence[int]], sampling: Sequence[dict[str, Any]], **body: Any) -> list[Any]:
    """Answers to all prompts, sent together, each sampled in its own way."""
    given = {"input_ids": [list(prompt) for prompt in prompts], "return_logprob": True, **body}
    answers: list[Any] = server.post("/generate", {**given, "sampling_params": list(sampling)})
    return answers


def first_logprobs(server: Server, prompt: Sequence[int], vocabulary: int) -> dict[int, float]:
    """Log-probability of every token after ``prompt``, at temperature 1, likeliest first."""
    greedy = {"temperature": 0, "max_new_tokens": 1, "ignore_eos": True}
    (answer,) = ask(server, [prompt], [greedy], top_logprobs_num=vocabulary)
    (top,) = answer["meta_info"]["output_top_logprobs"]
    found = {token: value for value, token, _ in top}
    assert len(found) == vocabulary and abs(sum(map(math.exp, found.values())) - 1) < 1e-3
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def nucleus(logprobs: dict[int, float], top_p: float) -> set[int]:
    """Tokens before which the likelier ones sum up to ``top_p`` at most, and those that are as likely as the last."""
    before, last = 0.0, 0.0
    for value in logprobs.values():
        if before > top_p:
            break
        before, last = before + math.exp(value), value
    return {token for token, value in logprobs.items() if value >= last - TIED}


def allowed(logprobs: dict[int, float], sampling: dict[str, Any]) -> set[int]:
    """Tokens that top-p, top-k and min-p leave."""
    values = list(logprobs.values())
    left = nucleus(logprobs, sampling.get("top_p", 1.0))
    if "top_k" in sampling:
        left &= {token for token, value in logprobs.items() if value >= values[sampling["top_k"] - 1] - TIED}
    if "min_p" in sampling:
        least = values[0] + math.log(sampling["min_p"])
        left &= {token for token, value in logprobs.items() if value >= least - TIED}
    return left


def kinds(logprobs: dict[int, float]) -> list[dict[str, Any]]:
    """Ways to sample that leave the two or three likeliest tokens."""
    first, second, third = (math.exp(value) for value in list(logprobs.values())[:3])
    return [
        {"top_p": first + second + third / 2},
        {"top_k": 3},
        {"min_p": 0.8 * second / first},
        {"top_p": first + second / 2, "top_k": 20, "min_p": 0.1 * second / first},
    ]


def drawn(answer: Any) -> tuple[int, dict[int, float]]:
    """An answer's token, and the log-probability that every token had in that very pass, likeliest first."""
    (top,) = answer["meta_info"]["output_top_logprobs"]
    (token,) = tokens(answer)
    return token, {one: value for value, one, _ in sorted(top, reverse=True)}


def require_kinds(server: Server, prompt: Sequence[int], vocabulary: int) -> None:
    """Each kind draws of what it leaves and of nothing else, alone and in a batch with all kinds and greedy ones.

    Each draw is held against the log-probabilities of its own pass: on a GPU a batch of another size rounds otherwise.
    """
    common = {"temperature": 1, "max_new_tokens": 1, "ignore_eos": True}
    ways = kinds(first_logprobs(server, prompt, vocabulary))
    for kind in ways:
        answers = ask(server, [prompt] * DRAWS, [common | kind] * DRAWS, top_logprobs_num=vocabulary)
        for token, logprobs in map(drawn, answers):
            left = allowed(logprobs, kind)
            assert 1 < len(left) < vocabulary / 4, f"{kind}: choose another prompt: {len(left)} tokens are left"
            assert token in left, kind
        assert len({tokens(answer)[0] for answer in answers}) > 1, f"{kind}: {DRAWS} draws are one token"
    greedy = {**common, "temperature": 0}
    mixed = [greedy, *(common | kind for kind in ways)] * 3
    answers = ask(server, [prompt] * len(mixed), mixed, top_logprobs_num=vocabulary)
    for (token, logprobs), sampling in zip(map(drawn, answers), mixed, strict=True):
        assert token in allowed(logprobs, {"top_k": 1} if sampling is greedy else sampling), sampling


def scored(server: Server, prompt: Sequence[int], said: Sequence[int], vocabulary: int) -> list[dict[int, float]]:
    """Log-probability of every token in the place of each that was ``said`` after ``prompt``, without penalties."""
    body = {"logprob_start_len": len(prompt) - 1, "top_logprobs_num": vocabulary}
    (answer,) = ask(server, [[*prompt, *said]], [{"temperature": 0, "max_new_tokens": 1}], **body)
    tops = answer["meta_info"]["input_top_logprobs"][1:]
    assert len(tops) == len(said)
    return [{token: value for value, token, _ in top} for top in tops]


def penalised_at(prompt: Sequence[int], answer: Sequence[int], step: int, *, overlapped: bool) -> list[int]:
    """Tokens whose repetition is penalised at ``step``, of a request that runs alone.

    Without the overlap schedule those of the answer so far. With it SGLang prepares a pass before the token of the last
    one is known: penalties come one token late, and that of the first decode pass counts the prompt's last token
    (``ScheduleBatch.cumulate_penalty_output_tokens``).
    """
    if not overlapped:
        return [*answer[:step]]
    return [prompt[-1], *answer[: step - 1]] if step else []


def require_penalties(
    server: Server,
    prompt: Sequence[int],
    vocabulary: int,
    *,
    near: float = 0.05,
    strays: int = 0,
    count: int = 24,
    overlapped: bool = True,
) -> None:
    """Greedy answers under penalties are those that log-probabilities without penalties lead to.

    near: how far a log-probability may be off between a decode step and a prompt.
    strays: steps of an answer at which it may be off by more, as a choice of experts that flips has it.
    overlapped: whether the server has the overlap schedule, which drafts are served without.

    Those of frequency and presence are subtracted from them; a bias has one token said until they outweigh it. A
    repetition penalty lowers what was said and nothing else: what is said is at least as likely as all that was not.
    """
    frequency, presence, bias, token = 2.0, 1.0, 40.0, 97
    greedy: dict[str, Any] = {"temperature": 0, "max_new_tokens": count, "ignore_eos": True}
    likely = greedy | {"logit_bias": {str(token): bias}}
    penalised = likely | {"frequency_penalty": frequency, "presence_penalty": presence}
    ways = [likely, penalised, greedy, greedy | {"repetition_penalty": 2.0}]
    plain, once, free, bound = (tokens(ask(server, [prompt], [way])[0]) for way in ways)
    assert plain == [token] * count != once, (plain, once)
    short = []
    for step, logprobs in enumerate(scored(server, prompt, once, vocabulary)):
        said = penalised_at(prompt, once, step, overlapped=overlapped)
        scores = {
            one: value - frequency * said.count(one) - presence * (one in said) + bias * (one == token)
            for one, value in logprobs.items()
        }
        short.append(max(scores.values()) - scores[once[step]])
    require_near(short, near, strays, once)
    short = []
    for step, logprobs in enumerate(scored(server, prompt, bound, vocabulary)):
        said = penalised_at(prompt, bound, step, overlapped=overlapped)
        best = max(value for one, value in logprobs.items() if one not in said)
        short.append(best - logprobs[bound[step]])
    require_near(short, near, strays, bound)
    assert len(set(bound)) > len(set(free)) or len(set(free)) == count, (bound, free)


def require_near(short: Sequence[float], near: float, strays: int, answer: Sequence[int]) -> None:
    """What was said falls short of the best by ``near`` at most, but at ``strays`` steps."""
    assert sum(off > near for off in short) <= strays, [*zip(answer, short, strict=True)]


def require_bias(server: Server, prompt: Sequence[int]) -> None:
    """A bias forces a token on one request of a batch, and not on its neighbour."""
    sampling = {"temperature": 1, "max_new_tokens": 4, "ignore_eos": True}
    forced, free = ask(server, [prompt] * 2, [sampling | {"logit_bias": {"97": 1000}}, sampling])
    assert tokens(forced) == [97] * 4 != tokens(free)


def tokens(answer: Any) -> list[int]:
    """Token ids of an answer."""
    found: list[int] = answer["output_ids"]
    return found
