"""ChatML, the chat template that hwopt brings, for tokenizers without one of their own."""

from __future__ import annotations

from typing import Any

CHATML = """{%- if tools %}
{%- set described = messages[0].role == 'system' %}
{{- '<|im_start|>system\\n' + (messages[0].content + '\\n\\n' if described else '') }}
{{- 'You may call these functions:\\n<tools>\\n' }}
{%- for tool in tools %}{{- tool | tojson + '\\n' }}{%- endfor %}
{{- '</tools>\\nWrite each call as <tool_call>\\n{"name": NAME, "arguments": OBJECT}\\n</tool_call>.<|im_end|>\\n' }}
{%- set messages = messages[1:] if described else messages %}
{%- endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\\n' }}
{%- if message['role'] == 'assistant' %}
{%- generation %}{{- message['content'] }}
{%- for call in message.tool_calls or [] %}
{%- set function = call.function or call %}
{{- '\\n' if message['content'] or not loop.first else '' }}
{{- '<tool_call>\\n{"name": ' + function.name | tojson }}
{{- ', "arguments": ' + (function.arguments or {}) | tojson + '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>' }}{%- endgeneration %}
{%- else %}
{{- message['content'] + '<|im_end|>' }}
{%- endif %}
{{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
"""The template `data.chat_template = "chatml"`, as OpenAI published the format; calls as in Nous Hermes and Qwen2.5."""
CHATML_TOKENS = ("<|im_start|>", "<|im_end|>")


def add_chatml_tokens(tokenizer: Any) -> tuple[int, ...]:
    """Add the special tokens of the template "chatml" that `tokenizer` lacks, and return their numbers."""
    missing = [token for token in CHATML_TOKENS if token not in tokenizer.get_vocab()]
    tokenizer.add_tokens(missing, special_tokens=True)
    return tuple(tokenizer.convert_tokens_to_ids(missing))
