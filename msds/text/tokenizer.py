"""Text to token ids and back, exactly as the checkpoint's tokenizer.json defines it.

The `tokenizers` library does the encoding, in one object that knows the control tokens by marks instead of by
their spellings (see `controls`): text that spells a control token cannot become one unless we put the mark
there. Decoding is ours, over the exact bytes of the tokens, so that whole, incremental and per-token decoding
agree by construction.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msds.errors import PromptError, TokenizerError
from msds.text.controls import ControlTokens, Quotes, is_control
from msds.text.vocabulary import Vocabulary

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Encoder

# fields of tokenizer_config.json that name one token each
TOKEN_FIELDS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

# what the flags of an added token are where tokenizer_config.json leaves them out
_FLAGS = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}


def has_tokenizer(folder: str | Path) -> bool:
    """Whether a checkpoint folder holds a tokenizer; without one a model still runs on token ids."""
    return (Path(folder) / "tokenizer.json").is_file()


class Tokenizer:
    """The tokenizer of a checkpoint folder.

    `bos_id`, `eos_id`: ids named by tokenizer_config.json, or None. `vocab_size`: highest id + 1, which may
    be below the model's vocabulary (padding) or above the number of tokens (holes). `special_ids`: tokens
    that `decode` leaves out by default, which are those the files call special; control tokens that they do
    not call so, such as DeepSeek's `</think>`, stay in the text. `control_ids`: spelling -> id of every
    control token. `named_tokens`: what chat templates know as `bos_token` and so on.
    """

    def __init__(self, tokenizer_json: Mapping[str, Any], config: Mapping[str, Any] | None = None) -> None:
        """Takes the parsed tokenizer.json and tokenizer_config.json; raises TokenizerError."""
        from tokenizers import Tokenizer as Encoder  # on first use: `msds --help` must stay fast

        config = config or {}
        parts = _merge_added_tokens(tokenizer_json, config)
        self.vocabulary = Vocabulary(parts)
        self.vocab_size = self.vocabulary.size
        added = parts["added_tokens"]
        self.control_ids = {str(t["content"]): int(t["id"]) for t in added if is_control(t)}
        self.controls = ControlTokens(self.control_ids)
        self.named_tokens = {
            field: content for field in TOKEN_FIELDS if (content := _content(config.get(field))) is not None
        }
        self.bos_id = self._named_id("bos_token")
        self.eos_id = self._named_id("eos_token")
        named = (self.vocabulary.id_of(content) for content in self.named_tokens.values())
        self.special_ids = frozenset(
            [int(t["id"]) for t in added if t.get("special")] + [id_ for id_ in named if id_ is not None]
        )
        marked = _with_marks(parts, self.controls.marks)
        try:
            self._encoder = Encoder.from_str(json.dumps(marked, ensure_ascii=False))
        except Exception as error:  # the library raises bare Exception
            raise TokenizerError(f"tokenizer.json cannot be used: {error}") from None
        for spelling, mark in self.controls.marks.items():
            id_ = self.control_ids[spelling]
            if self._encoder.token_to_id(mark) != id_:
                raise TokenizerError(
                    f"tokenizer.json: added token {spelling!r} has id {id_}, which does not follow from the "
                    "vocabulary before it; the file is damaged or was edited by hand"
                )
        self._bos_prefix = self._find_bos_prefix(self._encoder, config.get("add_bos_token"))

    @classmethod
    def open(cls, folder: str | Path) -> "Tokenizer":
        """The tokenizer of a checkpoint folder: tokenizer.json and, when present, tokenizer_config.json."""
        folder = Path(folder)
        path = folder / "tokenizer.json"
        if not path.is_file():
            others = [name for name in ("tokenizer.model", "vocab.json") if (folder / name).is_file()]
            hint = f" ({others[0]} alone is not supported: save it as a fast tokenizer)" if others else ""
            raise TokenizerError(f"no tokenizer.json in {folder}{hint}; token ids work without a tokenizer")
        tokenizer_json = read_json(path)
        if not isinstance(tokenizer_json.get("model"), dict) or "vocab" not in tokenizer_json["model"]:
            raise TokenizerError(f"{path} holds no model with a vocabulary; is it a tokenizer file?")
        return cls(tokenizer_json, read_tokenizer_config(folder))

    def encode(self, text: str, *, bos: bool = True) -> list[int]:
        """Ids of a raw prompt in which control tokens may be spelled out.

        `bos` puts the beginning-of-sequence token in front, once: as `add_bos_token` of tokenizer_config.json
        says, or else as the file's post-processor does; never when the text itself begins with it.
        """
        ids = self._encode(self.controls.mark(text))
        if bos and ids[: len(self._bos_prefix)] != self._bos_prefix:
            ids = self._bos_prefix + ids
        return ids

    def encode_plain(self, text: str) -> list[int]:
        """Ids of text in which nothing is a control token, whatever it spells. No BOS."""
        return self._encode(text)

    def encode_quoted(self, text: str, quotes: Quotes) -> list[int]:
        """Ids of a rendered chat: spellings are control tokens, what `quotes` hides is text. No BOS."""
        return self._encode(quotes.unquote(self.controls.mark(text)))

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True, continuation: bool = False) -> str:
        """Text of token ids; ids without a token give nothing.

        Bytes that are not UTF-8 read as U+FFFD, a last character that is cut as a single one.
        `continuation`: the ids follow other text, so a leading space of a word-marking vocabulary is kept.
        """
        pieces = [self.vocabulary.bytes_of(id_) for id_ in ids if not (skip_special_tokens and id_ in self.special_ids)]
        if not continuation:
            first = next((number for number, piece in enumerate(pieces) if piece), None)
            if first is not None:
                pieces[first] = self.vocabulary.first_bytes(pieces[first])
        return b"".join(pieces).decode("utf-8", errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The exact bytes of one token, possibly a part of a character; b"" for an id that no token has."""
        return self.vocabulary.bytes_of(token_id)

    def token_id(self, token: str) -> int | None:
        """Id of a token by its spelling in tokenizer.json, or None."""
        return self.vocabulary.id_of(token)

    def _encode(self, text: str) -> list[int]:
        require_unicode(text)
        return list(self._encoder.encode(text, add_special_tokens=False).ids)

    def _named_id(self, field: str) -> int | None:
        content = self.named_tokens.get(field)
        if content is None:
            return None
        id_ = self.vocabulary.id_of(content)
        if id_ is None:
            raise TokenizerError(f"tokenizer_config.json: {field} {content!r} is not in tokenizer.json's vocabulary")
        return id_

    def _find_bos_prefix(self, encoder: "Encoder", add_bos_token: object) -> list[int]:
        """The ids in front of a raw prompt: the post-processor's, overruled by `add_bos_token`."""
        bare = encoder.encode("a", add_special_tokens=False).ids
        full = encoder.encode("a", add_special_tokens=True).ids
        starts = (n for n in range(len(full) - len(bare) + 1) if full[n : n + len(bare)] == bare)
        prefix = list(full[: next(starts, 0)])
        if add_bos_token is True:
            if self.bos_id is None:
                raise TokenizerError("tokenizer_config.json: add_bos_token is true, but there is no bos_token")
            return prefix if self.bos_id in prefix else [self.bos_id, *prefix]
        if add_bos_token is False:
            return [id_ for id_ in prefix if id_ != self.bos_id]
        return prefix


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file of the tokenizer; raises TokenizerError naming the file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TokenizerError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(value, dict):
        raise TokenizerError(f"{path} must hold a JSON object, not {type(value).__name__}")
    return value


def read_tokenizer_config(folder: Path) -> dict[str, Any]:
    """tokenizer_config.json, completed by the older special_tokens_map.json; empty when there is neither."""
    config: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        if (folder / name).is_file():
            config.update(read_json(folder / name))
    return config


def require_unicode(text: str) -> None:
    """Raise PromptError when a string cannot be encoded as UTF-8 (JSON lets lone surrogates through)."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise PromptError(
            f"the text has a lone surrogate U+{ord(text[error.start]):04X} at character {error.start}; "
            "surrogates must come in pairs"
        ) from None


def _content(token: object) -> str | None:
    """The text of a token in tokenizer_config.json: a string, or an AddedToken written as a dict, or null."""
    if isinstance(token, Mapping):
        token = token.get("content")
    if token is None or isinstance(token, str):
        return token or None
    raise TokenizerError(f"tokenizer_config.json: {token!r} is not a token")


def _merge_added_tokens(tokenizer_json: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """tokenizer.json with the added tokens that only tokenizer_config.json lists, ordered by id."""
    added = {int(token["id"]): dict(token) for token in tokenizer_json.get("added_tokens") or ()}
    for id_, token in (config.get("added_tokens_decoder") or {}).items():
        added.setdefault(int(id_), {**_FLAGS, **token, "id": int(id_)})
    return {**tokenizer_json, "added_tokens": [added[id_] for id_ in sorted(added)]}


def _with_marks(tokenizer_json: Mapping[str, Any], marks: Mapping[str, str]) -> dict[str, Any]:
    """tokenizer.json in which the control tokens are spelled by their marks, and which never cuts or pads.

    Control tokens that are also in the model's own vocabulary are renamed there too, so that no merge and no
    whole-word match can produce one. Marks match before normalisation, as nothing may rewrite them.
    """
    added = [
        {**token, "content": marks[token["content"]], "normalized": False} if is_control(token) else token
        for token in tokenizer_json["added_tokens"]
    ]
    model = dict(tokenizer_json["model"])
    vocab = model["vocab"]
    if isinstance(vocab, Mapping):
        renamed = {token for token in marks if token in vocab}
        model["vocab"] = {marks.get(token, token): id_ for token, id_ in vocab.items()}
        if renamed:
            model["merges"] = [merge for merge in model["merges"] if not _touches(merge, renamed)]
    else:
        model["vocab"] = [[marks.get(token, token), score] for token, score in vocab]
    if model.get("unk_token") in marks:
        model["unk_token"] = marks[model["unk_token"]]
    return {**tokenizer_json, "added_tokens": added, "model": model, "truncation": None, "padding": None}


def _touches(merge: Any, tokens: set[str]) -> bool:
    """Whether a merge rule ("a b", or ["a", "b"]) uses or makes one of the tokens."""
    left, right = merge.split(" ", 1) if isinstance(merge, str) else merge
    return left in tokens or right in tokens or left + right in tokens
