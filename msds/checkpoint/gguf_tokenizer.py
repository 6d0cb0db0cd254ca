"""The byte-level BPE tokenizer inside a GGUF file, as `tokenizer.json` and `tokenizer_config.json`.

GGUF names the splitting rule (`tokenizer.ggml.pre`) without spelling it out, so the rules are a table here;
a name outside the table is refused, since a wrong rule gives slightly wrong ids and no error.
"""

from collections.abc import Callable
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from msds.checkpoint.gguf_metadata import Metadata, token_ids
from msds.errors import CheckpointError

# tokenizer.ggml.token_type
_CONTROL, _USER_DEFINED, _UNUSED = 3, 4, 5

_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|DIGITS"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Contractions, words with the mark or space before them, numbers, punctuation, line ends, other space."""


def _split_words(digits: str) -> Any:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS.replace("DIGITS", digits)), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _smollm(tokenizer: Tokenizer) -> None:
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )


def _qwen2(tokenizer: Tokenizer) -> None:
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _split_words(r"\p{N}")


def _llama3(tokenizer: Tokenizer) -> None:
    tokenizer.model.ignore_merges = True  # a word that is a token as a whole is taken before any merge
    tokenizer.pre_tokenizer = _split_words(r"\p{N}{1,3}")


_RULES: dict[str, Callable[[Tokenizer], None]] = {
    "smollm": _smollm,
    "qwen2": _qwen2,
    "deepseek-r1-qwen": _qwen2,
    "llama-bpe": _llama3,
}


def build_tokenizer(metadata: Metadata, vocab_size: int) -> Tokenizer:
    """The tokenizer that the GGUF file describes, for a model with `vocab_size` embeddings.

    Errors name a model or rule that is not in the table.
    """
    model = metadata.require("tokenizer.ggml.model", str)
    if model != "gpt2":
        raise CheckpointError(f"{metadata.source}: tokenizer model {model!r} cannot be imported; gpt2 (BPE) can")
    rule = metadata.optional("tokenizer.ggml.pre", str) or "default"
    if rule not in _RULES:
        raise CheckpointError(
            f"{metadata.source}: splitting rule tokenizer.ggml.pre = {rule!r} is not known; "
            f"known are {', '.join(_RULES)}"
        )
    tokens, kinds = _vocabulary(metadata)
    if len(tokens) > vocab_size:
        raise CheckpointError(f"{metadata.source}: {len(tokens)} tokens but only {vocab_size} embeddings")
    merges = [tuple(merge.split(" ")) for merge in metadata.require("tokenizer.ggml.merges", list)]
    if wrong := [merge for merge in merges if len(merge) != 2]:
        raise CheckpointError(f"{metadata.source}: merge {' '.join(wrong[0])!r} is not a pair of tokens")
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    _RULES[rule](tokenizer)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = _post_processor(metadata, tokens, rule)
    for kind, is_special in ((_CONTROL, True), (_USER_DEFINED, False)):
        added = [
            AddedToken(token, special=is_special, normalized=False)
            for token, this in zip(tokens, kinds, strict=True)
            if this == kind
        ]
        if is_special:
            tokenizer.add_special_tokens(added)
        else:
            tokenizer.add_tokens(added)
    return tokenizer


def tokenizer_config(metadata: Metadata) -> dict[str, Any]:
    """`tokenizer_config.json`: special tokens, whether texts begin with BOS, the chat template."""
    tokens = metadata.require("tokenizer.ggml.tokens", list)
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": metadata.optional("tokenizer.ggml.add_bos_token", bool) or False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": metadata.positive(f"{metadata.architecture}.context_length"),
    }
    for name, token_id in token_ids(metadata).items():
        if not 0 <= token_id < len(tokens):
            raise CheckpointError(f"{metadata.source}: {name} {token_id} is outside the {len(tokens)} tokens")
        config[name.removesuffix("_id")] = tokens[token_id]
    template = metadata.optional("tokenizer.chat_template", str)
    if template is not None:
        config["chat_template"] = template
    return config


def _vocabulary(metadata: Metadata) -> tuple[list[str], list[int]]:
    """Tokens and their kinds, without the padding that brings their number to the model's vocabulary."""
    tokens: list[str] = metadata.require("tokenizer.ggml.tokens", list)
    kinds: list[int] = metadata.optional("tokenizer.ggml.token_type", list) or [1] * len(tokens)
    if len(kinds) != len(tokens):
        raise CheckpointError(f"{metadata.source}: {len(tokens)} tokens but {len(kinds)} token types")
    count = len(tokens)
    while count and kinds[count - 1] == _UNUSED:
        count -= 1
    return tokens[:count], kinds[:count]


def _post_processor(metadata: Metadata, tokens: list[str], rule: str) -> Any:
    byte_level = processors.ByteLevel(trim_offsets=False)
    bos_id = token_ids(metadata).get("bos_token_id")
    add_bos = metadata.optional("tokenizer.ggml.add_bos_token", bool)
    if rule != "llama-bpe" or bos_id is None or add_bos is False:
        return byte_level
    # Llama 3's own tokenizer.json begins texts with BOS in this way; those of the other rules leave it to
    # the caller.
    bos = tokens[bos_id]
    return processors.Sequence(
        [
            byte_level,
            processors.TemplateProcessing(
                single=[bos, "$A"], pair=[bos, "$A", bos, "$B:1"], special_tokens=[(bos, bos_id)]
            ),
        ]
    )
