"""Chat templates of ten models, from their public documentation, with {% generation %} around what an answer is: what
follows the prompt for an answer. Without these marks they are what the models come with."""

import re
from pathlib import Path

import pytest

from tests.unit.data.tokenizers_made import made

_HEADERS = "{{% for m in messages %}}{{{{ {0} }}}}{{% if m.role == 'assistant' %}}{{% generation %}}{{{{ {1} }}}}{{% endgeneration %}}{{% else %}}{{{{ {1} }}}}{{% endif %}}{{% endfor %}}"  # noqa: E501


def _by_header(header: str, body: str, prompt: str, begin: str = "", end: str = "") -> str:
    """A template whose turns are all a header and a body."""
    return begin + _HEADERS.format(header, body) + "{% if add_generation_prompt %}" + prompt + "{% endif %}" + end


LLAMA_2 = (
    "{% if messages[0]['role'] == 'system' %}{% set turns = messages[1:] %}{% set system = messages[0]['content'] %}"
    "{% else %}{% set turns = messages %}{% set system = false %}{% endif %}{% for m in turns %}"
    "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if loop.index0 == 0 and system != false %}"
    "{% set content = '<<SYS>>\\n' + system + '\\n<</SYS>>\\n\\n' + m['content'] %}"
    "{% else %}{% set content = m['content'] %}{% endif %}{% if m['role'] == 'user' %}"
    "{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}{% elif m['role'] == 'assistant' %}"
    "{% generation %}{{ ' '  + content.strip() + ' ' + eos_token }}{% endgeneration %}{% endif %}{% endfor %}"
)
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + ' [/INST]' }}{% else %}"
    "{% generation %}{{ m['content'] + eos_token + ' ' }}{% endgeneration %}{% endif %}{% endfor %}"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}"
    "{% endif %}{% for m in messages %}{% set role = 'model' if m['role'] == 'assistant' else m['role'] %}"
    "{{ '<start_of_turn>' + role + '\\n' }}{% if role == 'model' %}"
    "{% generation %}{{ m['content'] | trim + '<end_of_turn>\\n' }}{% endgeneration %}{% else %}"
    "{{ m['content'] | trim + '<end_of_turn>\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"
)
QWEN_WITH_TOOLS = (
    "{% if tools %}{{ '<|im_start|>system\\n' }}{% if messages[0].role == 'system' %}{{ messages[0].content }}"
    "{% else %}{{ 'You are a helpful assistant.' }}{% endif %}{{ '\\n\\n# Tools\\n\\n<tools>' }}"
    "{% for tool in tools %}{{ '\\n' + tool | tojson }}{% endfor %}{{ '\\n</tools><|im_end|>\\n' }}{% endif %}"
    "{% for m in messages %}{% if m.role == 'user' or (m.role == 'system' and not (tools and loop.first)) %}"
    "{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% elif m.role == 'assistant' %}"
    "{{ '<|im_start|>assistant\\n' }}{% generation %}{{ m.content }}{% for call in m.tool_calls or [] %}"
    '{{ \'\\n<tool_call>\\n{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{{ call.function.arguments | tojson + '}\\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\\n' }}{% endgeneration %}"
    "{% elif m.role == 'tool' %}{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}"
    "{{ '<|im_start|>user' }}{% endif %}{{ '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
DEEPSEEK = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}{{ 'User: ' + m['content'] + '\\n\\n' }}"
    "{% elif m['role'] == 'assistant' %}{{ 'Assistant:' }}{% generation %}{{ ' ' + m['content'] + eos_token }}"
    "{% endgeneration %}{% elif m['role'] == 'system' %}{{ m['content'] + '\\n\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
TEMPLATES = {
    "ChatML": _by_header("'<|im_start|>' + m.role + '\\n'", "m.content + '<|im_end|>\\n'", "<|im_start|>assistant\n"),
    "Llama 2": LLAMA_2,
    "Llama 3": _by_header(
        "'<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n'",
        "m.content | trim + '<|eot_id|>'",
        "{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}",
        "{{ bos_token }}",
    ),
    "Mistral": MISTRAL,
    "Gemma": GEMMA,
    "Phi-3": _by_header(
        "'<|' + m.role + '|>\\n'",
        "m.content + '<|end|>\\n'",
        "{{ '<|assistant|>\\n' }}{% elif messages[-1].role == 'assistant' %}"
        "{% generation %}{{ eos_token }}{% endgeneration %}{% else %}{{ eos_token }}",
    ),
    "Zephyr": _by_header("'<|' + m.role + '|>\\n'", "m.content + eos_token + '\\n'", "{{ '<|assistant|>\\n' }}"),
    "Qwen with tools": QWEN_WITH_TOOLS,
    "DeepSeek": DEEPSEEK,
    "Command-R": _by_header(
        "'<|START_OF_TURN_TOKEN|>' + {'system': '<|SYSTEM_TOKEN|>', 'user': '<|USER_TOKEN|>', "
        "'assistant': '<|CHATBOT_TOKEN|>'}[m.role]",
        "m.content.strip() + '<|END_OF_TURN_TOKEN|>'",
        "{{ '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' }}",
        "{{ bos_token }}",
    ),
}
R1_DISTILL = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ '<|User|>' + m.content }}{% else %}"
    "{{ '<|Assistant|>' + m.content.split('</think>')[-1] + eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|Assistant|><think>\\n' }}{% endif %}"
)
"""Its prompt for an answer begins a thought that the answers before do not have: nobody can tell an answer by it."""


def without_marks(template: str) -> str:
    """The template as models come with it."""
    return re.sub(r"{% (end)?generation %}", "", template)


def chat_tokenizer(folder: Path) -> str:
    """A folder with a tokenizer whose template is ChatML without marks."""
    backend = made("bytes, GPT-2")
    backend.decoder = pytest.importorskip("tokenizers").decoders.ByteLevel()
    special = {"bos_token": "<s>", "eos_token": "<|endoftext|>", "additional_special_tokens": ["<|im_end|>"]}
    kind = pytest.importorskip("transformers").PreTrainedTokenizerFast
    kind(tokenizer_object=backend, **special).save_pretrained(folder)
    (folder / "chat_template.jinja").write_text(without_marks(TEMPLATES["ChatML"]))
    return str(folder)
