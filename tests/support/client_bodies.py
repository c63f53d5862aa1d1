"""What well-known clients send by default, beside the wish of their user: bodies by path.

Written from the clients' published sources and documentation. Where a client sends nothing of its own (the ``openai``
and ``anthropic`` packages), its users' commonest fields are here.
"""

from __future__ import annotations

from typing import Any

HELLO = [{"role": "user", "content": "hi"}]

WEATHER = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}

CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}

CHATS: dict[str, dict[str, Any]] = {
    "openai": {"messages": HELLO, "stream": True, "stream_options": {"include_usage": True}, "user": "u"},
    "openai with the last answer in the history": {
        "messages": [
            *HELLO,
            {
                "role": "assistant",
                "content": "Hello.",
                "refusal": None,
                "annotations": None,
                "audio": None,
                "function_call": None,
                "tool_calls": None,
                "reasoning_content": None,
            },
            {"role": "user", "content": "And?"},
        ],
        "store": False,
        "metadata": {"a": "b"},
        "service_tier": "auto",
    },
    "LangChain": {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "hi", "name": "somebody"},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "content": "sunny", "tool_call_id": "call_1"},
        ],
        "tools": [{"type": "function", "function": {"name": "weather", "description": "", "parameters": WEATHER}}],
        "parallel_tool_calls": False,
        "max_completion_tokens": 3,
        "n": 1,
        "stream": False,
    },
    "LiteLLM": {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}]},
            {
                "role": "assistant",
                "content": "Hello.",
                "tool_calls": None,
                "function_call": None,
                "provider_specific_fields": {"refusal": None},
                "annotations": [],
                "thinking_blocks": [],
                "reasoning_content": "A greeting.",
            },
            {"role": "user", "content": "And?"},
        ],
        "temperature": 0.2,
        "stream": True,
    },
    "Open WebUI": {
        "messages": HELLO,
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0.8,
        "top_p": 0.9,
        "frequency_penalty": 0,
        "presence_penalty": 0,
        "reasoning_effort": "medium",
        "stop": ["###"],
    },
    "Aider": {
        "messages": [*HELLO, {"role": "assistant", "content": "a", "prefix": True}],
        "temperature": 0,
        "stream": True,
    },
    "Cline": {
        "messages": [{"role": "system", "content": "x"}, {"role": "user", "content": [{"type": "text", "text": "hi"}]}],
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    },
    "users of vLLM": {
        "messages": HELLO,
        "chat_template_kwargs": {"enable_thinking": False},
        "add_generation_prompt": True,
        "include_reasoning": True,
        "top_k": 20,
        "min_p": 0,
        "repetition_penalty": 1.05,
    },
    "users of DeepSeek's API": {"messages": HELLO, "thinking": {"type": "enabled"}, "reasoning_effort": "high"},
    "users of OpenRouter": {"messages": HELLO, "reasoning": {"enabled": True, "effort": "low", "exclude": False}},
}

COMPLETIONS: dict[str, dict[str, Any]] = {
    "openai": {"prompt": "The quick", "best_of": 1, "echo": False, "logprobs": None, "suffix": None, "user": "u"},
    "lm-evaluation-harness": {"prompt": [[30, 31]], "temperature": 0, "logprobs": 1, "echo": True, "seed": 1234},
}

RESPONSES: dict[str, dict[str, Any]] = {
    "openai": {"input": "hi", "metadata": {"a": "b"}, "store": True, "truncation": "disabled"},
    "Codex": {
        "instructions": "You are a coding agent.",
        "input": [
            {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "rules"}]},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": None, "encrypted_content": "gAAAA"},
            {"type": "function_call", "name": "shell", "arguments": '{"command":["ls"]}', "call_id": "call_1"},
            {"type": "function_call_output", "call_id": "call_1", "output": "a.txt"},
            {
                "type": "custom_tool_call",
                "name": "apply_patch",
                "input": "*** Begin",
                "call_id": "call_2",
                "status": "completed",
            },
            {"type": "custom_tool_call_output", "call_id": "call_2", "output": "done"},
        ],
        "tools": [
            {"type": "function", "name": "shell", "description": "", "strict": False, "parameters": WEATHER},
            {
                "type": "custom",
                "name": "apply_patch",
                "description": "edits",
                "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "x"'},
            },
            {"type": "web_search", "external_web_access": False},
        ],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "5f1c",
        "service_tier": "priority",
        "text": {"verbosity": "medium"},
        "client_metadata": {"a": "b"},
    },
    "OpenAI Agents": {
        "input": [{"role": "user", "content": "hi"}],
        "include": [],
        "tools": [],
        "parallel_tool_calls": None,
        "previous_response_id": None,
        "truncation": "auto",
    },
}

MESSAGES: dict[str, dict[str, Any]] = {
    "anthropic": {"messages": HELLO, "system": "Be brief.", "stop_sequences": ["###"], "service_tier": "auto"},
    "anthropic with a beginning of the answer": {"messages": [*HELLO, {"role": "assistant", "content": "Hello"}]},
    "Claude Code": {
        "system": [
            {"type": "text", "text": "You are a coding agent.", "cache_control": {"type": "ephemeral"}},
            {"type": "text", "text": "Rules.", "cache_control": {"type": "ephemeral", "ttl": "1h"}},
        ],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "hi"}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "A greeting.", "signature": "abc"},
                    {"type": "text", "text": "Hello.", "citations": None},
                    {"type": "tool_use", "id": "toolu_1", "name": "Bash", "input": {"command": "ls"}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {
                        "type": "tool_result",
                        "tool_use_id": "toolu_1",
                        "content": [{"type": "text", "text": "a.txt"}],
                        "is_error": False,
                        "cache_control": {"type": "ephemeral"},
                    },
                    {"type": "text", "text": "And?"},
                ],
            },
        ],
        "tools": [
            {
                "name": "Bash",
                "description": "Runs a command.",
                "input_schema": {"type": "object", "properties": {"command": {"type": "string"}}},
                "cache_control": {"type": "ephemeral"},
                "eager_input_streaming": True,
            }
        ],
        "tool_choice": {"type": "auto"},
        "metadata": {"user_id": "user_1"},
        "thinking": {"type": "adaptive", "display": "omitted"},
        "output_config": {"effort": "medium"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "betas": ["interleaved-thinking-2025-05-14"],
        "temperature": 1,
        "stream": True,
    },
    "Claude Code with a budget": {
        "messages": HELLO,
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "metadata": {"user_id": "user_1"},
        "stream": True,
    },
}

BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    **{f"chat: {client}": ("/v1/chat/completions", body) for client, body in CHATS.items()},
    **{f"completion: {client}": ("/v1/completions", body) for client, body in COMPLETIONS.items()},
    **{f"response: {client}": ("/v1/responses", body) for client, body in RESPONSES.items()},
    **{f"message: {client}": ("/v1/messages", {"max_tokens": 3, **body}) for client, body in MESSAGES.items()},
}
"""Path and body by client. A name of a model is added by whoever sends them."""
