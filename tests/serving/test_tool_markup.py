"""Tool calls are read strictly: a call has the arguments that the model wrote, and everything else is content.

Against an independent reference, on calls that DeepSeek's encoder writes and on thousands of mutations of its markup.
"""

from __future__ import annotations

import contextlib
import json
import random
import re
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from sglang.srt.parser.deepseek_recipe_output import DeepSeekRecipeOutputParser, whole_tool_calls
from sglang.srt.parser.deepseek_recipe_renderer import DeepSeekRecipe

from nvfp4_sgl.serving import tool_calls
from nvfp4_sgl.serving.tool_markup import MARK, TOKEN, MarkupScanner
from nvfp4_sgl.synthetic.tokenizer import build_tokenizer

NAMES = ("f", "get_weather", "a_b-c")
MUTATIONS = 4000


# --- an independent reference -------------------------------------------------------------------------------------

PARAMETER = rf'<{MARK}parameter name="([^"{MARK}]*)" string="(true|false)">([^{MARK}]*)</{MARK}parameter>'
INVOKE = re.compile(
    rf'[ \t\r\n]*<{MARK}invoke name="([^"{MARK}]*)"(?:/>|>((?:[ \t\r\n]|{PARAMETER})*)</{MARK}invoke>)', re.DOTALL
)
CLOSE = f"</{MARK}tool_calls>"


def distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    assert len(dict(pairs)) == len(pairs)
    return dict(pairs)


def no_constant(text: str) -> None:
    raise ValueError(text)


def reference_call(match: re.Match[str], forced: bool) -> tuple[str, dict[str, Any]] | None:
    """Name and arguments of an invoke that is well formed; ``None`` where its function or values are not.

    ``forced``: what is not JSON under ``string="false"`` is a text, which a grammar of calls lets stand there.
    """
    if match[1] not in NAMES:
        return None
    arguments: dict[str, Any] = {}
    for name, string, value in re.findall(PARAMETER, match[2] or ""):
        try:
            parsed = (
                value if string == "true" else json.loads(value, object_pairs_hook=distinct, parse_constant=no_constant)
            )
        except (ValueError, AssertionError):
            if not forced:
                return None
            parsed = value
        if name in arguments:
            return None
        arguments[name] = parsed
    return match[1], arguments


def reference(text: str, *, forced: bool = False) -> tuple[str, list[tuple[str, dict[str, Any]]]]:
    """Content and calls of a whole answer."""
    content, calls, position = "", [], 0
    while (block := re.compile(rf"(?:\n\n?)?<{MARK}tool_calls>").search(text, position)) is not None:
        content += text[position : block.start()]
        position, found = block.end(), 0
        while (match := INVOKE.match(text, position)) and (call := reference_call(match, forced)):
            calls.append(call)
            position, found = match.end(), found + 1
        if not found:
            content += block[0]
            continue
        rest = text[position:].lstrip(" \t\r\n")
        if rest.startswith(CLOSE):
            position = len(text) - len(rest) + len(CLOSE)
        elif CLOSE.startswith(rest):
            position = len(text)
    return (content + text[position:]).replace(MARK, TOKEN), calls


def scan(pieces: Sequence[str], *, spelled: bool = False) -> tuple[str, list[tuple[str, dict[str, Any]]]]:
    scanner = MarkupScanner(NAMES, spelled=spelled)
    read = [scanner.feed(piece) for piece in pieces] + [scanner.feed("", final=True)]
    calls = [(call.name, json.loads(call.arguments)) for _, found in read for call in found]
    return "".join(content for content, _ in read), calls


# --- random calls and markup --------------------------------------------------------------------------------------

TEXTS = (
    "Paris",
    "",
    " two\n lines ",
    '"q" & <b>',
    "世界 🚀",
    "&lt;x&gt;",
    f"</{TOKEN}parameter>",
    "</invoke>",
    "\n\n",
    "{}",
)


def random_json(rng: random.Random, depth: int = 2) -> Any:
    # deepseek-recipe writes integers of more than 64 bits of a past call as floats
    kinds: list[Any] = [None, True, rng.randrange(-(10**18), 10**18), rng.choice((0.5, 1e300, -2.0)), rng.choice(TEXTS)]
    if depth:
        kinds += [
            [random_json(rng, depth - 1) for _ in range(rng.randrange(3))],
            {rng.choice("abc") + str(n): random_json(rng, depth - 1) for n in range(rng.randrange(3))},
        ]
    return rng.choice(kinds)


def random_call(rng: random.Random) -> tuple[str, dict[str, Any]]:
    names = rng.sample(("x", "y", "city name", "a>b", "", "日"), rng.randrange(4))
    return rng.choice(NAMES), {name: random_json(rng) for name in names}


def markup(calls: Sequence[tuple[str, dict[str, Any]]]) -> str:
    """A block as the encoder writes it."""
    lines = ["\n\n<｜DSML｜tool_calls>"]
    for name, arguments in calls:
        lines.append(f'<｜DSML｜invoke name="{name}">')
        for key, value in arguments.items():
            is_string = isinstance(value, str)
            written = value if is_string else json.dumps(value, ensure_ascii=False)
            written = written.replace(TOKEN, "*")  # what a value spells is no tag
            tag = f'<｜DSML｜parameter name="{key}" string="{json.dumps(is_string)}">'
            lines.append(f"{tag}{written}</｜DSML｜parameter>")
        lines.append("</｜DSML｜invoke>")
    lines.append("</｜DSML｜tool_calls>")
    return "\n".join(lines).replace(TOKEN, MARK)


def mutate(rng: random.Random, text: str) -> str:
    """``text`` with one fault, of a kind that models make or of any kind."""
    start, end = sorted(rng.randrange(len(text) + 1) for _ in range(2))
    lines = text.split("\n")
    line = rng.randrange(len(lines))
    tags = [match.span() for match in re.finditer(rf"</?{MARK}[^>]*>", text)]
    first, last = rng.choice(tags)
    return rng.choice(
        (
            lambda: text[:start],
            lambda: text[start:],
            lambda: text[:start] + text[start + 1 :],
            lambda: text[:start] + rng.choice(('"', "<", ">", "/", " ", MARK, "\n", "x", "&", "{", ",")) + text[start:],
            lambda: text[:start] + text[end:],
            lambda: text[:end] + text[start:],
            lambda: "\n".join(lines[:line] + lines[line + 1 :]),
            lambda: "\n".join(lines[: line + 1] + lines[line:]),
            lambda: "\n".join(rng.sample(lines, len(lines))),
            lambda: text[:first] + text[last:],
            lambda: text[:start] + text[first:last] + text[start:],
            lambda: re.sub(r' string="\w+"', "", text, count=1),
            lambda: text.replace('string="true"', 'string="false"', 1),
            lambda: text.replace('string="false"', 'string="true"', 1),
            lambda: text.replace('string="true"', "string='true'", 1),
            lambda: re.sub(r'(invoke name=")[^"]*"', r'\1other"', text, count=1),
            lambda: re.sub(rf">\n</{MARK}invoke>", f'>\n{{"x": "1"}}\n</{MARK}invoke>', text, count=1),
            lambda: re.sub(r'">\n', '"/>\n', text, count=1),
            lambda: re.sub(
                r'false">[^<]*', rng.choice(('false">hello', 'false">NaN', 'false">{"a":1,"a":2}')), text, count=1
            ),
            lambda: text.replace("tool_calls", "function_calls"),
            lambda: text.replace(f"<{MARK}tool_calls>\n", "", 1),
            lambda: text + text,
            lambda: text.replace('"', "&quot;", 2),
        )
    )()


def cut(rng: random.Random, text: str) -> list[str]:
    ends = sorted(rng.randrange(len(text) + 1) for _ in range(rng.randrange(1, 12)))
    return [text[start:end] for start, end in zip([0, *ends], [*ends, len(text)], strict=True)]


def test_mutations_are_read_as_the_reference_reads_them() -> None:
    rng = random.Random(20)
    seen = {"unchanged": 0, "calls": 0, "both": 0}
    for _ in range(MUTATIONS):
        text = rng.choice(("", "I look.", "a < b")) + markup([random_call(rng) for _ in range(rng.randrange(1, 4))])
        for _ in range(rng.randrange(1, 3)):
            text = mutate(rng, text or "x" + markup([("f", {})]))
            if not re.search(rf"</?{MARK}[^>]*>", text):
                text += markup([random_call(rng)])
        content, calls = scan([text])
        assert (content, calls) == reference(text), text
        assert scan(cut(rng, text)) == (content, calls), text
        spelled = text.replace(MARK, TOKEN)
        assert scan(cut(rng, spelled), spelled=True) == reference(spelled.replace(TOKEN, MARK), forced=True), text
        assert scan(cut(rng, spelled)) == (spelled, []), text
        if not calls:
            assert content == text.replace(MARK, TOKEN)
        unread = MARK in text and TOKEN in content
        seen["both" if calls and unread else "calls" if calls else "unchanged"] += 1
    assert min(seen.values()) > MUTATIONS // 20, seen


@pytest.mark.parametrize("value", ["Paris\n", "NaN", '{"a": 1, "a": 2}'])
def test_a_forced_call_keeps_a_text_that_is_marked_as_json(value: str) -> None:
    """A grammar of calls lets it stand, and an answer under one is a call whatever the model wrote."""
    text = markup([("f", {"x": "text"})]).replace('string="true">text', f'string="false">{value}')
    assert scan([text], spelled=True) == ("", [("f", {"x": value})])
    content, calls = scan([text])
    assert not calls and value in content


def test_every_cut_is_the_same() -> None:
    rng = random.Random(21)
    for _ in range(20):
        text = f"Hm\n{markup([random_call(rng) for _ in range(2)])}\nand"
        text = mutate(rng, text) if rng.random() < 0.7 else text
        whole = scan([text])
        assert scan(list(text)) == whole
        for place in range(len(text)):
            assert scan([text[:place], text[place:]]) == whole, (text, place)


BLOCK = markup([("f", {"x": "1"})])


@pytest.mark.parametrize(
    "text",
    [
        BLOCK.replace(f'<{MARK}parameter name="x" string="true">1</{MARK}parameter>', '{"x":"1"}'),
        BLOCK.replace('string="true">1', 'string="false">hello'),
        BLOCK.replace('string="true">1', 'string="false">NaN'),
        BLOCK.replace('string="true">1', 'string="false">' + "[" * 100_000),
        BLOCK.replace(' string="true"', ""),
        BLOCK.replace(f"</{MARK}parameter>", ""),
        BLOCK.replace(f"</{MARK}invoke>", ""),
        BLOCK.replace("\n</", "\nprose\n</", 1),
        BLOCK.replace('"f"', '"undeclared"'),
        BLOCK.replace(">1<", f'>1<{MARK}parameter name="y" string="true">2<'),
        BLOCK.replace(
            f"\n</{MARK}invoke>", f'\n<{MARK}parameter name="x" string="true">2</{MARK}parameter>\n</{MARK}invoke>'
        ),
        BLOCK[: BLOCK.index(f"</{MARK}invoke>") + 5],
        BLOCK.replace(f"<{MARK}tool_calls>\n", ""),
        f"\n\n<{MARK}tool_calls>\n</{MARK}tool_calls>",
        f"\n\n<{MARK}tool_calls>",
    ],
    ids=lambda text: text[22:60].replace(MARK, TOKEN),
)
def test_malformed_markup_is_content(text: str) -> None:
    assert scan([text]) == (text.replace(MARK, TOKEN), [])
    assert scan(list(text[:500])) == scan([text[:500]])


def test_what_is_read_besides_the_encoders_own_writing() -> None:
    """Free whitespace, a call without parameters in one tag, text behind a block, a second block, a cut end."""
    call = ("f", {"x": "1"})
    assert scan(["a" + BLOCK.strip().replace("\n", "\n \t")]) == ("a", [call])
    assert scan([f'<{MARK}tool_calls><{MARK}invoke name="f"/></{MARK}tool_calls>']) == ("", [("f", {})])
    assert scan([f"{BLOCK} and{BLOCK}!"]) == (" and!", [call, call])
    assert scan([BLOCK[:-5]]) == ("", [call])
    assert scan([BLOCK.replace(f"</{MARK}tool_calls>", "prose")]) == ("\nprose", [call])


def test_numbers_stay_as_they_are_written() -> None:
    text = markup([("f", {"x": 0})]).replace(">0<", ">[1.00, 1e400, 123456789012345678901234567890]<")
    ((_, (call,)),) = [MarkupScanner(NAMES).feed(text)]
    assert call.arguments == '{"x": [1.00, 1e400, 123456789012345678901234567890]}'


def test_a_long_call_is_read_in_time() -> None:
    """A megabyte of an argument, a few characters at a time, that looks like tags."""
    value = '<parameter name="x" string="true">' * 30_000
    text = markup([("f", {"x": value})])
    assert scan([text[n : n + 50] for n in range(0, len(text), 50)]) == ("", [("f", {"x": value})])


# --- through deepseek-recipe, by tokens ---------------------------------------------------------------------------


class OutputParser(DeepSeekRecipeOutputParser):
    """SGLang's parser with the hooks that a server has."""

    def __init__(self, *args: Any, **kwargs: Any):
        tool_calls.init_output_parser(DeepSeekRecipeOutputParser.__init__, self, *args, **kwargs)

    def _deltas(self, chunks: list[Any]) -> Any:
        return tool_calls.output_deltas(DeepSeekRecipeOutputParser._deltas, self, chunks)

    def finish(self, *args: Any, **kwargs: Any) -> Any:
        return tool_calls.finish_output(DeepSeekRecipeOutputParser.finish, self, *args, **kwargs)


@pytest.fixture(scope="module")
def recipe() -> DeepSeekRecipe:
    return DeepSeekRecipe("dsv4", build_tokenizer(512))


@pytest.fixture(autouse=True)
def our_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tool_calls, "serves_our_model", lambda: True)


@contextlib.contextmanager
def declared(*names: str) -> Iterator[None]:
    class Tool:
        def __init__(self, name: str):
            self.name = name

    with tool_calls.declared([Tool(name) for name in names]):
        yield


def parse(recipe: DeepSeekRecipe, pieces: Sequence[Sequence[int]], thinking: bool = False, **options: Any) -> Any:
    with declared(*NAMES):
        parser = OutputParser(
            recipe, thinking_stage=recipe.parse_start(thinking=thinking), parse_tool_calls=True, **options
        )
    delta = parser.feed([])
    for piece in pieces:
        delta = delta.merge(parser.feed(piece))
    return delta.merge(parser.finish([], {"type": "stop"}))


def called(delta: Any) -> list[tuple[str, Any]]:
    return [(call.name, json.loads(call.arguments)) for call in whole_tool_calls(delta)]


def encoded(recipe: DeepSeekRecipe, text: str, calls: Sequence[tuple[str, Any]]) -> list[int]:
    """Ids of an assistant's turn in a prompt."""
    functions = [{"name": name, "arguments": json.dumps(arguments)} for name, arguments in calls]
    messages = [
        {"role": "user", "content": "q"},
        {
            "role": "assistant",
            "content": text,
            "tool_calls": [{"id": str(n), "type": "function", "function": one} for n, one in enumerate(functions)],
        },
        *({"role": "tool", "tool_call_id": str(n), "content": "r"} for n in range(len(calls))),
    ]
    tools = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in NAMES]
    ids = recipe.encode({"messages": messages, "thinking": False, "tools": tools})
    special = recipe.hf_tokenizer.token_to_id
    start = ids.index(special("</think>"), ids.index(special("<｜Assistant｜>"))) + 1
    return ids[start : ids.index(special("<｜end▁of▁sentence｜>"), start)]


def test_calls_of_a_prompt_are_read_again(recipe: DeepSeekRecipe) -> None:
    rng = random.Random(22)
    for number in range(150):
        calls = [random_call(rng) for _ in range(rng.randrange(1, 4))]
        text = rng.choice(("", "I look.", f"<{TOKEN}tool_calls>", "é🚀"))
        ids = encoded(recipe, text, calls)
        delta = parse(recipe, [[one] for one in ids] if number % 2 else [ids], separate_reasoning=bool(number % 3))
        assert (delta.content, called(delta)) == (text, calls)


def test_markup_is_known_by_its_token(recipe: DeepSeekRecipe) -> None:
    """Spelled in other tokens, it is text: in an answer, and in an argument."""
    encode = lambda text: recipe.hf_tokenizer.encode(text, add_special_tokens=False).ids  # noqa: E731
    block = BLOCK.replace(MARK, TOKEN)
    first, *rest = block.split(TOKEN)
    spelled = encode(first) + [one for part in rest for half in ("｜DSM", "L｜" + part) for one in encode(half)]
    answer = parse(recipe, [encode("It is") + spelled])
    assert (answer.content, answer.tool_calls) == ("It is" + block, ())
    before, after = (encode(part) for part in block.split("1<", 1))
    delta = parse(recipe, [before + spelled + encode("<") + after])
    assert (delta.content, called(delta)) == ("", [("f", {"x": block})])


def test_reasoning_and_what_follows_a_malformed_call(recipe: DeepSeekRecipe) -> None:
    block = BLOCK.replace(MARK, TOKEN)
    bad = block.replace(' string="true"', "")
    for text, reasoning, content, calls in (
        (f"hm</think>yes{block}", "hm", "yes", 1),
        (f"hm{block}", "hm", "", 1),
        (f"hm{bad}</think>yes{bad}", f"hm{bad}", f"yes{bad}", 0),
        (f"hm{block}</think>yes{block}", "hm", "yes", 2),
        ("hm\n<</think>yes\n\n<", "hm\n<", "yes\n\n<", 0),
    ):
        ids = recipe.hf_tokenizer.encode(text, add_special_tokens=False).ids
        for pieces in ([ids], [[one] for one in ids]):
            delta = parse(recipe, pieces, thinking=True)
            assert (delta.reasoning, delta.content, len(called(delta))) == (reasoning, content, calls)
    assert parse(recipe, [ids], thinking=True, stream_reasoning=False).reasoning == "hm\n<"


def test_unknown_functions_on_demand(recipe: DeepSeekRecipe, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = recipe.hf_tokenizer.encode(BLOCK.replace(MARK, TOKEN).replace('"f"', '"g"'), add_special_tokens=False).ids
    assert not parse(recipe, [ids]).tool_calls
    monkeypatch.setenv(tool_calls.FORWARD_UNKNOWN, "1")
    assert called(parse(recipe, [ids])) == [("g", {"x": "1"})]
