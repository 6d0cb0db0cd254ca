"""A byte-level BPE tokenizer of 300-odd tokens in the layout of a DeepSeek-R1 folder.

It writes any text: all 256 bytes are tokens, so Chinese and emoji split into pieces of characters. Ids:
0 begin, 1 end, 2 pad, 3.. bytes and merges, then the markers <｜User｜> <｜Assistant｜> <think> </think>.
"""

from __future__ import annotations

import json
from pathlib import Path

BOS, EOS, PAD = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"
MARKERS = ("<｜User｜>", "<｜Assistant｜>", "<think>", "</think>")
_TEXT = [
    "the sea is wide and the sky is high",
    "answer the question, then think again",
    "你好，世界。你好吗？",
]

# As R1's: begin once, system first, thoughts of earlier answers dropped, a new answer starts by thinking.
CHAT_TEMPLATE = """\
{{- bos_token -}}
{%- for message in messages if message['role'] == 'system' -%}
{{- message['content'] -}}
{%- endfor -%}
{%- for message in messages -%}
{%- if message['role'] == 'user' -%}
{{- '<｜User｜>' + message['content'] -}}
{%- elif message['role'] == 'assistant' -%}
{%- set spoken = message['content'].split('</think>') | last -%}
{{- '<｜Assistant｜>' + spoken + eos_token -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<｜Assistant｜><think>\\n' -}}
{%- endif -%}
"""


def write_tokenizer(folder: Path) -> None:
    """tokenizer.json and tokenizer_config.json, the same bytes every time."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        show_progress=False,
        special_tokens=[BOS, EOS, PAD],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    tokenizer.train_from_iterator(_TEXT, trainer)
    tokenizer.add_tokens([AddedToken(marker, normalized=False) for marker in MARKERS])
    tokenizer.save(str(folder / "tokenizer.json"))

    def added(content: str) -> dict[str, object]:
        flags = {"lstrip": False, "normalized": True, "rstrip": False, "single_word": False}
        return {"__type": "AddedToken", "content": content, **flags}

    settings = {
        "add_bos_token": True,
        "add_eos_token": False,
        "bos_token": added(BOS),
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "eos_token": added(EOS),
        "legacy": True,
        "model_max_length": 16384,
        "pad_token": added(PAD),
        "tokenizer_class": "LlamaTokenizerFast",
        "unk_token": None,
    }
    text = json.dumps(settings, indent=2, ensure_ascii=False)
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")
