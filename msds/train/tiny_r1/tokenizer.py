"""The tokenizer of the tiny R1: byte-level BPE trained on its own problems, with DeepSeek's special tokens.

Ids: 0 begin, 1 end, 2 pad, bytes and merges, then <｜User｜> <｜Assistant｜> <think> </think>. Each digit is a
token of its own, so that columns of a number can be looked up one by one.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

BOS, EOS, PAD = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"
MARKERS = ("<｜User｜>", "<｜Assistant｜>", "<think>", "</think>")
VOCAB_SIZE = 512

# DeepSeek-R1's conventions: the system text follows the begin token, thoughts of earlier answers are dropped, and an
# answer starts by thinking.
CHAT_TEMPLATE = """\
{%- if not add_generation_prompt is defined -%}{%- set add_generation_prompt = false -%}{%- endif -%}
{{- bos_token -}}
{%- for message in messages if message['role'] == 'system' -%}{{- message['content'] -}}{%- endfor -%}
{%- for message in messages -%}
  {%- if message['role'] == 'user' -%}
    {{- '<｜User｜>' + message['content'] -}}
  {%- elif message['role'] == 'assistant' -%}
    {{- '<｜Assistant｜>' + (message['content'].split('</think>') | last) + eos_token -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<｜Assistant｜><think>\\n' -}}{%- endif -%}
"""


def write_tokenizer(folder: Path, texts: Iterable[str]) -> None:
    """Train on `texts` and write tokenizer.json and tokenizer_config.json; the same texts give the same bytes."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\p{N}"), behavior="isolated"),
            pre_tokenizers.Split(Regex(r"[一-龥]+"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(MARKERS),
        show_progress=False,
        special_tokens=[BOS, EOS, PAD],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([AddedToken(marker, normalized=False) for marker in MARKERS])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "add_bos_token": True,
        "add_eos_token": False,
        "bos_token": _added(BOS),
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "eos_token": _added(EOS),
        "legacy": True,
        "model_max_length": 1024,
        "pad_token": _added(PAD),
        "tokenizer_class": "LlamaTokenizerFast",
        "unk_token": None,
    }
    text = json.dumps(settings, indent=2, ensure_ascii=False) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")


def _added(content: str) -> dict[str, object]:
    flags = {"lstrip": False, "normalized": True, "rstrip": False, "single_word": False}
    return {"__type": "AddedToken", "content": content, **flags}
