"""Every place where SGLang's front end tokenises or decodes, and what keeps it from stopping the event loop.

A place that a new version of SGLang adds fails this test until it has a row.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from nvfp4_sgl.serving.tokenizing import HOOKS

TOKENIZERS = {"tokenizer", "hf_tokenizer", "deepseek_recipe", "parallel_prompt_encode", "encode_prompt_segments"}
METHODS = {"encode", "decode", "batch_decode", "apply_chat_template", "encode_batch"}

NOT_OFFERED = "the path is not offered for this model"
OTHER_MODEL = "other models' chats, parsers or images"
START = "when the server starts"
BOUNDED = "a few words, or the ids of one request"

CHAT = "entrypoints/openai/serving_chat.py OpenAIServingChat."
COMPLETION = "entrypoints/openai/serving_completions.py OpenAIServingCompletion."
DECISIONS = "entrypoints/openai/serving_decisions.py "
SCORE = "managers/tokenizer_manager_score_mixin.py TokenizerManagerScoreMixin."
TOKENIZE = "entrypoints/openai/serving_tokenize.py OpenAIServing"

PLACES = {
    "entrypoints/anthropic/serving.py AnthropicServing.handle_count_tokens": "count_tokens",
    "entrypoints/grpc_bridge.py RuntimeHandle.detokenize": NOT_OFFERED,
    "entrypoints/grpc_bridge.py RuntimeHandle.tokenize": NOT_OFFERED,
    "entrypoints/ollama/serving.py OllamaServing.handle_chat": NOT_OFFERED,
    "entrypoints/openai/chat_encoding.py encode_simple_chat": "not called by the server",
    "entrypoints/openai/parallel_prompt_encode.py encode_prompt_segments": OTHER_MODEL,
    "entrypoints/openai/parallel_prompt_encode.py parallel_prompt_encode": OTHER_MODEL,
    f"{CHAT}__init__": START,
    f"{CHAT}_append_assistant_prefix_to_prompt_ids": "openai_request",
    f"{CHAT}_apply_conversation_template": "openai_request",
    f"{CHAT}_apply_jinja_template": "openai_request",
    f"{CHAT}_encode_messages": "openai_request",
    f"{CHAT}_probe_prompt_text_round_trip": START,
    f"{CHAT}_process_messages": "openai_request",
    f"{CHAT}_render_and_encode_chat_template": "openai_request",
    f"{CHAT}_set_response_parser_context": OTHER_MODEL,
    f"{COMPLETION}_get_echo_text": BOUNDED,
    f"{COMPLETION}_prepare_echo_prompts": BOUNDED,
    f"{DECISIONS}OpenAIServingDecisions._apply_chat_template": NOT_OFFERED,
    f"{DECISIONS}OpenAIServingDecisions._encode_question": NOT_OFFERED,
    f"{DECISIONS}OpenAIServingDecisions._render_reply": NOT_OFFERED,
    f"{DECISIONS}_has_media_marker": NOT_OFFERED,
    f"{DECISIONS}label_context": NOT_OFFERED,
    f"{DECISIONS}label_token_id": NOT_OFFERED,
    "entrypoints/openai/serving_deepseek_recipe.py DeepSeekRecipeChatEncodingAdapter._encode": "encode_chat",
    "entrypoints/openai/serving_embedding.py"
    " OpenAIServingEmbedding._apply_jinja_template_to_embedding_inputs": OTHER_MODEL,
    "entrypoints/openai/serving_inkling.py _check_served_tokenizer": OTHER_MODEL,
    "entrypoints/openai/serving_rerank.py _get_yes_no_token_ids": NOT_OFFERED,
    f"{TOKENIZE}Detokenize._handle_non_streaming_request": "detokenize",
    f"{TOKENIZE}Tokenize._handle_non_streaming_request": "tokenize",
    f"{TOKENIZE}Tokenize._tokenize_chat_request": "tokenize",
    "entrypoints/openai/transcription_adapters/whisper.py WhisperAdapter._parse_segments": NOT_OFFERED,
    "entrypoints/systemone/joint_schema.py encode_joint_schema.tokens": NOT_OFFERED,
    "entrypoints/systemone/kev.py encode_kev.tokens": NOT_OFFERED,
    "entrypoints/systemone/serving.py SystemOneServing._pair_labels": NOT_OFFERED,
    "managers/async_dynamic_batch_tokenizer.py AsyncDynamicbatchTokenizer._process_dynamic_batch": "its own thread",
    "managers/tokenizer_control_mixin.py TokenizerControlMixin.add_external_corpus": NOT_OFFERED,
    "managers/tokenizer_manager.py TokenizerManager._tokenize_texts": "tokenize_texts",
    "managers/tokenizer_manager.py TokenizerManager.detokenize_logprob_tokens": BOUNDED,
    f"{SCORE}_batch_tokenize_query_and_items": "score",
    f"{SCORE}_build_score_extraction_text_inputs": "score",
    "parser/deepseek_recipe_output.py parse_output_text": BOUNDED,
    "parser/deepseek_recipe_renderer.py DeepSeekRecipe.encode_text": BOUNDED,
    "parser/inkling_output.py InklingOutputParser._payload_json": OTHER_MODEL,
    "parser/inkling_output.py InklingOutputParser._payload_text": OTHER_MODEL,
    "parser/python_chat_template.py install_python_chat_template.apply_chat_template": OTHER_MODEL,
    "parser/reasoning_parser.py BaseReasoningFormatDetector.get_think_end_token_ids": BOUNDED,
    "parser/reasoning_parser.py MiniMaxM3Detector.get_self_opened_think_start_token_ids": OTHER_MODEL,
    "parser/response_template.py ResponseTemplateReasoningDetector.get_think_end_token_ids": OTHER_MODEL,
    "parser/response_template.py tool_close_tokens": OTHER_MODEL,
}
"""What covers each place: a hook, or why it needs none."""

OTHER_PROCESSES = ("detokenizer_manager.py", "schedule_batch.py", "scheduler.py")


def callers(node: ast.AST, name: str) -> Iterator[str]:
    """Names of the functions in which a tokenizer is called."""
    for child in ast.iter_child_nodes(node):
        inner = name
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            inner = f"{name}.{child.name}".lstrip(".")
        if isinstance(child, ast.Call):
            method = isinstance(child.func, ast.Attribute) and child.func.attr in METHODS
            owner = child.func.value if method and isinstance(child.func, ast.Attribute) else child.func
            if ast.unparse(owner).rsplit(".", 1)[-1] in TOKENIZERS:
                yield name
        yield from callers(child, inner)


def test_every_place_has_a_row() -> None:
    spec = find_spec("sglang")
    assert spec is not None and spec.origin is not None
    root = Path(spec.origin).parent / "srt"
    files = [path for folder in ("entrypoints", "managers", "parser") for path in (root / folder).rglob("*.py")]
    found = {
        f"{path.relative_to(root)} {name}"
        for path in files
        if path.name not in OTHER_PROCESSES
        for name in callers(ast.parse(path.read_text()), "")
    }
    assert found == set(PLACES)


def test_rows_name_hooks() -> None:
    reasons = {NOT_OFFERED, OTHER_MODEL, START, BOUNDED, "its own thread", "not called by the server"}
    assert {row for row in PLACES.values() if row not in reasons} <= set(HOOKS)
