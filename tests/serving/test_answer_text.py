"""The text of an answer, streamed or not, is that of all its tokens up to the first complete stop string.

In one process: SGLang's own request, output of the scheduler, detokenizer and parser of chats, with our hooks in them.
The expected text is cut out of the decoded whole, character by character.
"""

from __future__ import annotations

import functools
import itertools
import json
import random
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pkgutil import resolve_name
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from nvfp4_sgl.serving import answer_parser, answer_text, requests, stop_strings, token_bytes, tool_calls
from nvfp4_sgl.serving.sglang.hooked import HOOKS as LEDGER
from nvfp4_sgl.synthetic.tokenizer import write_tokenizer

VOCAB, CASES = 512, 400
END_THINK, DSML = "</think>", "｜DSML｜"
CALL = f'Yes.\n\n<{DSML}tool_calls>\n<{DSML}invoke name="find">\n<{DSML}parameter name="city" string="true">'
CALL_END = f"</{DSML}parameter>\n</{DSML}invoke>\n</{DSML}tool_calls>"
HOOKS = stop_strings.HOOKS | {
    "init_output_parser": answer_parser.prepare,
    "output_deltas": tool_calls.output_deltas,
    "finish_output": tool_calls.finish_output,
    "cut_at_stop": answer_parser.cut_at_stop,
    "normalize_sampling": requests.normalize_sampling,
    "printable": token_bytes.printable,
}
LENGTH = {"type": "length"}
REPLACEMENT = "\ufffd"


@pytest.fixture(scope="module", autouse=True)
def hooked() -> Iterator[None]:
    """Our hooks, in this process."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (requests, answer_parser, token_bytes, tool_calls):
            patch.setattr(module, "serves_our_model", lambda: True)
        for name, hook in HOOKS.items():
            owner, _, attribute = LEDGER[name].path.rpartition(".")
            patch.setattr(resolve_name(owner), attribute, around(hook, resolve_name(LEDGER[name].path)))
        yield


def around(hook: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: hook(original, *args, **kwargs)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerFast:
    from sglang.srt.utils.hf_transformers_utils import get_tokenizer

    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder, VOCAB, 4096)
    return get_tokenizer(str(folder))


@pytest.fixture(scope="module")
def new_parser(tokenizer: PreTrainedTokenizerFast) -> Callable[..., Any]:
    """``new_parser(thinking=, stop=, tools=)``: SGLang's parser of one answer of a chat."""
    from sglang.srt.parser.deepseek_recipe_output import DeepSeekRecipeOutputParser
    from sglang.srt.parser.deepseek_recipe_renderer import DeepSeekRecipe

    recipe = DeepSeekRecipe.from_hf_tokenizer("dsv4", tokenizer)

    def parser(*, thinking: bool = False, stop: tuple[str, ...] = (), tools: bool = False) -> Any:
        stage = recipe.parse_start(thinking=thinking)
        return DeepSeekRecipeOutputParser(recipe, thinking_stage=stage, parse_tool_calls=tools, stop=stop)

    return parser


@dataclass(frozen=True)
class Case:
    """An answer that a model would give if nothing stopped it, and how it is asked for."""

    ids: list[int]
    stops: tuple[str, ...] = ()
    keep_stop: bool = False
    interval: int = 1

    def expected(self, decode: answer_text.Decode) -> tuple[str, str | None]:
        """Text and stop string, from the text of all tokens."""
        text = decode(self.ids)
        for end in range(len(text) + 1):
            complete = [stop for stop in self.stops if text[:end].endswith(stop)]
            if complete:
                stop = max(complete, key=len)
                return text[: end if self.keep_stop else end - len(stop)], stop
        return text, None


def byte_characters() -> list[str]:
    """How byte-level BPE spells each byte, as GPT-2 defined it: printable Latin-1 as it is, others from U+0100 on."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = itertools.count(256)
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


BYTE_CHARACTERS = byte_characters()


def bytes_of(tokenizer: PreTrainedTokenizerFast, data: bytes) -> list[int]:
    """A token id for every byte."""
    return [tokenizer.convert_tokens_to_ids(BYTE_CHARACTERS[byte]) for byte in data]


def draw(source: random.Random, tokenizer: PreTrainedTokenizerFast, newline: str = "\n") -> Case:
    """Few characters, so that stop strings begin and do not end; tokens of a byte or of several; broken UTF-8."""
    ids: list[int] = []
    for _ in range(source.randint(1, 14)):
        piece = "".join(
            source.choices(["a", "b", "ab", " ", "the", newline, "ü", "中", "文", "🚀", "🚁"], k=2)
        ).encode()
        if source.random() < 0.1:
            piece = bytes([source.choice([0xFF, 0x80, 0xF0, 0x9F, 0xE4])])
        whole = source.random() < 0.5 and piece[0] < 0x80
        ids += tokenizer.encode(piece.decode(), add_special_tokens=False) if whole else bytes_of(tokenizer, piece)
    ids = ids[: source.randint(1, len(ids))]
    text = tokenizer.decode(ids)
    stops = []
    for _ in range(source.randint(0, 3)):
        start = source.randrange(len(text))
        stop = text[start : start + source.randint(1, 5)] + source.choice(["", "", "x", "🚀"])
        stops += [stop] if REPLACEMENT not in stop else []
    return Case(ids, tuple(stops), source.random() < 0.2, source.choice([1, 1, 2, 5]))


def chunks(case: Case, tokenizer: PreTrainedTokenizerFast, *, stream: bool) -> Iterator[tuple[Any, int]]:
    """What the scheduler sends while the answer grows a token at a time, and how many tokens there are by then."""
    from sglang.srt.disaggregation.utils import DisaggregationMode
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.managers.scheduler_components.output_streamer import _GenerationStreamAccumulator
    from sglang.srt.sampling.sampling_params import SamplingParams
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    params = SamplingParams(stop=list(case.stops), max_new_tokens=len(case.ids), no_stop_trim=case.keep_stop)
    params.normalize(tokenizer)
    req = Req("r", "", array("q", tokenizer.encode("the ", add_special_tokens=False)), params, stream=stream)
    req.tokenizer = tokenizer
    while not req.finished():
        req.output_ids.append(case.ids[len(req.output_ids)])
        req.update_finish_state()
        accumulator = _GenerationStreamAccumulator(
            return_logprob=False,
            return_hidden_states=False,
            return_routed_experts=False,
            return_indexer_topk=False,
            spec_algorithm=SpeculativeAlgorithm.NONE,
            disaggregation_mode=DisaggregationMode.NULL,
            default_stream_interval=case.interval,
            default_force_stream_interval=case.interval,
            get_cached_tokens_details=lambda req: None,
            is_request_level_customized_info_key=lambda key: False,
            current_weight_version=None,
        )
        accumulator.accept(req=req)
        yield accumulator, len(req.output_ids)


def detokenizer(tokenizer: PreTrainedTokenizerFast) -> Any:
    """SGLang's, without its process."""
    from sglang.srt.managers.detokenizer_manager import DetokenizerManager

    manager = DetokenizerManager.__new__(DetokenizerManager)
    fields = {"tokenizer": tokenizer, "vocab_size": VOCAB, "decode_status": {}, "tool_close_token_ids": ()}
    vars(manager).update(fields, disable_tokenizer_batch_decode=False, is_tool_call_parser_gpt_oss=False)
    return manager


def payload(accumulator: Any) -> SimpleNamespace:
    """The part of a batch of tokens that a detokenizer reads."""
    return SimpleNamespace(
        **{
            name: getattr(accumulator, name)
            for name in (
                *("rids", "decoded_texts", "finished_reasons", "no_stop_trim", "read_offsets"),
                *("skip_special_tokens", "spaces_between_special_tokens"),
            )
        },
        decode_ids=accumulator.decode_ids_list,
    )


@pytest.mark.parametrize("stream", [True, False])
def test_texts_are_those_of_all_tokens(stream: bool, tokenizer: PreTrainedTokenizerFast) -> None:
    """``/generate`` and ``/v1/completions``."""
    for seed in range(CASES):
        case = draw(random.Random(seed), tokenizer)
        text, stop = case.expected(tokenizer.decode)
        manager, sent, reason = detokenizer(tokenizer), "", None
        for accumulator, tokens in chunks(case, tokenizer, stream=stream):
            if accumulator.rids:
                sent += manager._decode_batch_token_id_output(payload(accumulator))[0]
                reason = accumulator.finished_reasons[0]
            assert text.startswith(sent), (seed, case, sent)
            if stream and case.interval == 1 and reason is None:
                ids = case.ids[:tokens]
                whole = answer_text.sendable(tokenizer.decode(ids), case.stops)
                count, _ = answer_text.split(ids, whole, tokenizer.decode)
                assert len(sent) >= len(tokenizer.decode(ids[:count]).rstrip(REPLACEMENT)), (seed, case, "held back")
        assert (sent, reason["matched"] if stop else None) == (text, stop), (seed, case)


@pytest.mark.parametrize("thinking", [False, True])
def test_texts_of_chats_are_those_of_all_tokens(
    thinking: bool, tokenizer: PreTrainedTokenizerFast, new_parser: Callable[..., Any]
) -> None:
    """Chats, messages and responses: reasoning and content, in a stream, at once and aborted.

    Without newlines, which deepseek-recipe drops around reasoning.
    """
    end_think = tokenizer.convert_tokens_to_ids(END_THINK)
    for seed in range(CASES):
        source = random.Random(seed)
        case = draw(source, tokenizer, newline="c")
        if thinking:
            case = Case([*bytes_of(tokenizer, b"."), *case.ids], case.stops, case.keep_stop, case.interval)
            if source.random() < 0.7:
                case.ids.insert(source.randint(1, len(case.ids)), end_think)
        text, _ = case.expected(functools.partial(tokenizer.decode, skip_special_tokens=False))
        first, _, second = text.partition(END_THINK) if thinking else ("", "", text)
        parser, reasoning, content, ids = new_parser(thinking=thinking, stop=case.stops), "", "", []
        for accumulator, _ in chunks(case, tokenizer, stream=True):
            if not accumulator.rids:
                continue
            new, reason = list(accumulator.output_ids[0]), accumulator.finished_reasons[0]
            ids += new
            delta = parser.finish(new, reason, keep_matched_stop=case.keep_stop) if reason else parser.feed(new)
            reasoning, content = reasoning + delta.reasoning, content + delta.content
            assert first.startswith(reasoning) and second.startswith(content), (seed, case)
        assert (reasoning, content) == (first, second), (seed, case)
        whole = new_parser(thinking=thinking, stop=case.stops).finish(ids, reason, keep_matched_stop=case.keep_stop)
        assert (whole.reasoning, whole.content) == (first, second), (seed, case)
        if reason["type"] == "length":
            aborted = new_parser(thinking=thinking).finish(ids, {"type": "abort"})
            assert (aborted.reasoning, aborted.content) == (first, second), (seed, case)


def test_a_call_of_a_tool_is_cut_between_characters(
    tokenizer: PreTrainedTokenizerFast, new_parser: Callable[..., Any]
) -> None:
    """A call that is cut off is content; a complete one has all of its arguments."""
    opening, closing = (tokenizer.encode(text, add_special_tokens=False) for text in (CALL, CALL_END))
    value = bytes_of(tokenizer, 'Zürich "中🚀'.encode())
    for length in range(1, len(value) + 2):
        ids = opening + value[:length] + (closing if length > len(value) else [])
        answers = []
        for parts in ([[token] for token in ids], [ids]):
            calls: list[Any] = []
            parser, content = new_parser(tools=True), ""
            for delta in (*map(parser.feed, parts[:-1]), parser.finish(parts[-1], LENGTH)):
                content, calls = content + delta.content, [*calls, *delta.tool_calls]
            answers.append((content, "".join(call.arguments for call in calls)))
        if length > len(value):
            assert [json.loads(arguments) for _, arguments in answers] == [{"city": tokenizer.decode(value)}] * 2
        else:
            assert answers == [(tokenizer.decode(ids), "")] * 2


@pytest.mark.parametrize("length", [1, 3, 2000])
def test_a_long_end_that_is_no_text(
    length: int, tokenizer: PreTrainedTokenizerFast, new_parser: Callable[..., Any]
) -> None:
    """Every U+FFFD is there, and no more than one character waits."""
    parser, ids = new_parser(), bytes_of(tokenizer, b"ab" + b"\xff" * length)
    sent = ""
    for token in ids:
        sent += parser.feed([token]).content
    assert len(sent) >= length + 1
    assert sent + parser.finish([], LENGTH).content == "ab" + REPLACEMENT * length
    assert new_parser().finish(ids, LENGTH).content == "ab" + REPLACEMENT * length


@pytest.mark.parametrize(
    ("text", "stops", "expected"),
    [
        ("ab", ("b", "ab"), "ab"),
        ("abc", ("abc", "b"), "b"),
        ("xaab", ("aab", "ab"), "aab"),
        ("none", ("x", ""), None),
    ],
)
def test_the_stop_string_that_is_complete_first(text: str, stops: tuple[str, ...], expected: str | None) -> None:
    assert answer_text.first_complete(text, stops) == expected


@pytest.mark.parametrize(
    ("text", "stops", "sendable"),
    [
        ("ab", (), 2),
        ("ab\ufffd", (), 2),
        ("ab\ufffdc", (), 4),
        ("xabab", ("abc",), 3),
        ("xaba", ("abab",), 1),
        ("xab\ufffd", ("ab🚀",), 1),
        ("a🚀", ("🚀",), 2),
        ("aaaa", ("aab", "aaaab"), 0),
    ],
)
def test_what_may_be_sent(text: str, stops: tuple[str, ...], sendable: int) -> None:
    assert answer_text.sendable(text, stops) == sendable


def test_a_long_answer_is_split_in_time_that_grows_with_its_length(
    tokenizer: PreTrainedTokenizerFast, new_parser: Callable[..., Any]
) -> None:
    decoded = 0

    def decode(ids: list[int]) -> str:
        nonlocal decoded
        decoded += len(ids)
        return str(tokenizer.decode(ids))

    ids = bytes_of(tokenizer, b"a" * 50_000 + "🚀stop".encode())
    assert answer_text.cut(ids, "🚀stop", decode, keep_stop=False) == (50_000, "")
    assert decoded < 200
    assert new_parser().finish(ids, {"type": "stop", "matched": "🚀stop"}).content == "a" * 50_000
