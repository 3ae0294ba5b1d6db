"""Requests as five harnesses send them, shortened: what is of a kind there occurs here."""

from __future__ import annotations

import json
from typing import Any

_SCHEMA: Any = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
_FUNCTION: Any = {"name": "bash", "description": "Runs <it>.", "parameters": _SCHEMA, "strict": True}

CLAUDE_CODE: Any = {
    "model": "gyre-policy",
    "max_tokens": 32000,
    "stream": True,
    "thinking": {"type": "adaptive"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "high"},
    "metadata": {"user_id": '{"session_id": "s"}'},
    "system": [
        {
            "type": "text",
            "text": "x-anthropic-billing-header: cc_version=2.1.220.a33; cc_entrypoint=sdk-cli;",
        },
        {"type": "text", "text": "You are an agent.", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "The folder is /w."},
    ],
    "messages": [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "<system-reminder>today</system-reminder>"},
                {"type": "text", "text": "List the files.", "cache_control": {"type": "ephemeral"}},
            ],
        },
        {"role": "system", "content": "Agent types: general."},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Which?", "signature": ""},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "toolu_1", "name": "Bash", "input": {"command": "ls"}},
                {"type": "tool_use", "id": "toolu_2", "name": "Bash", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "toolu_1", "content": "a.py", "is_error": False},
                {
                    "type": "tool_result",
                    "tool_use_id": "toolu_2",
                    "content": [{"type": "text", "text": "InputValidationError"}],
                    "is_error": True,
                },
                {"type": "text", "text": "CRITICAL: Respond with TEXT ONLY"},
            ],
        },
    ],
    "tools": [
        {"name": "Bash", "description": "Runs <it>.", "input_schema": _SCHEMA},
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
    ],
}

CODEX: Any = {
    "model": "gyre-policy",
    "stream": True,
    "store": False,
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "include": ["reasoning.encrypted_content"],
    "reasoning": {"summary": "auto"},
    "prompt_cache_key": "k",
    "client_metadata": {"b": "1", "a": "2"},
    "input": [
        {
            "type": "message",
            "role": "developer",
            "content": [{"type": "input_text", "text": "You are Codex."}],
        },
        {
            "type": "message",
            "role": "developer",
            "content": [{"type": "input_text", "text": "Skills: none."}],
        },
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "<cwd>/w</cwd>"}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "List the files."}]},
        {
            "type": "reasoning",
            "id": "rs_g1-0-0000",
            "summary": [{"type": "summary_text", "text": "Which?"}],
            "content": None,
            "encrypted_content": "g1-0-0000",
        },
        {
            "type": "message",
            "role": "assistant",
            "id": "msg_g1-0-0000",
            "content": [{"type": "output_text", "text": "I look."}],
        },
        {
            "type": "function_call",
            "id": "fc_g1-0-0000_0",
            "call_id": "call_1",
            "name": "shell",
            "arguments": '{"command": "ls"}',
        },
        {
            "type": "function_call",
            "id": "fc_g1-0-0000_1",
            "call_id": "call_2",
            "name": "spawn_agent",
            "namespace": "multi_agent_v1",
            "arguments": '{"message": ',
        },
        {"type": "function_call_output", "call_id": "call_1", "output": "a.py", "id": "fco_1"},
        {
            "type": "function_call_output",
            "call_id": "call_2",
            "output": [{"type": "input_text", "text": "failed to parse"}],
        },
    ],
    "tools": [
        {"type": "function", "name": "shell", "description": "Runs.", "parameters": _SCHEMA, "strict": False},
        {
            "type": "namespace",
            "name": "multi_agent_v1",
            "description": "Agents.",
            "tools": [{"type": "function", "name": "spawn_agent", "parameters": _SCHEMA, "strict": False}],
        },
        {"type": "web_search", "external_web_access": False},
    ],
}

QWEN_CODE: Any = {
    "model": "gyre-policy",
    "max_tokens": 8000,
    "stream": True,
    "stream_options": {"include_usage": True},
    "messages": [
        {"role": "system", "content": "You are Qwen Code."},
        {"role": "user", "content": "The folder is /w."},
        {"role": "assistant", "content": "Got it. Thanks for the context!"},
        {"role": "user", "content": [{"type": "text", "text": "List the files."}]},
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "Which?",
            "tool_calls": [
                {
                    "id": "c1",
                    "type": "function",
                    "function": {"name": "bash", "arguments": '{"command":"ls"}'},
                },
                {"id": "c2", "type": "function", "function": {"name": "bash", "arguments": '{"command": '}},
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "a.py"}]},
        {"role": "tool", "tool_call_id": "c2", "content": "failed"},
    ],
    "tools": [{"type": "function", "function": _FUNCTION}],
}

OPENCODE: Any = QWEN_CODE | {
    "tool_choice": "auto",
    "messages": [
        {"role": "system", "content": "You are a title generator."},
        {"role": "developer", "content": "Be short."},
        {"role": "user", "content": "List the files."},
        {"role": "assistant", "content": "", "tool_calls": []},
    ],
}

MINI_SWE_AGENT: Any = {
    "model": "gyre-policy",
    "messages": [
        {"role": "system", "content": "You are an agent."},
        {"role": "user", "content": "List the files."},
        {"role": "user", "content": "Every answer must have one tool call."},
    ],
    "tools": [{"type": "function", "function": _FUNCTION}],
}

# By API: its path, its bodies.
BODIES: dict[str, tuple[str, list[Any]]] = {
    "chat": ("/v1/chat/completions", [QWEN_CODE, OPENCODE, MINI_SWE_AGENT]),
    "messages": ("/v1/messages", [CLAUDE_CODE, CLAUDE_CODE | {"stream": False, "system": "Be short."}]),
    "responses": (
        "/v1/responses",
        [CODEX, CODEX | {"stream": False, "input": "hi", "instructions": "Be short."}],
    ),
    "count_tokens": ("/v1/messages/count_tokens", [CLAUDE_CODE]),
    "input_tokens": ("/v1/responses/input_tokens", [CODEX]),
}


def encoded(body: Any) -> bytes:
    return json.dumps(body).encode()
