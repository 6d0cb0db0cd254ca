"""The exact bytes of every token, read from the vocabulary and the decoder of a tokenizer.json."""

from collections.abc import Callable, Mapping
from typing import Any

from msds.errors import TokenizerError


def byte_alphabet() -> dict[str, int]:
    """Character -> byte in byte-level vocabularies (GPT-2's table).

    Printable Latin-1 bytes stand for themselves, the other 68 for the characters from U+0100 on, in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    hidden = (byte for byte in range(256) if byte not in printable)
    return alphabet | {chr(0x100 + number): byte for number, byte in enumerate(hidden)}


class Vocabulary:
    """Token ids and their bytes. Ids without a token (padding of the model's embedding) have no bytes."""

    def __init__(self, tokenizer_json: Mapping[str, Any]) -> None:
        self.added = {int(t["id"]): str(t["content"]) for t in tokenizer_json.get("added_tokens") or ()}
        self._base = _base_tokens(tokenizer_json["model"])
        self._to_bytes, self._first = _decoder(tokenizer_json.get("decoder"))
        self._ids = {token: id_ for id_, token in self._base.items()}
        self._ids.update({token: id_ for id_, token in self.added.items()})
        self.size = max((*self._base, *self.added), default=-1) + 1
        self._bytes: dict[int, bytes] = {}

    def same_tokens(self, other: "Vocabulary") -> bool:
        """Whether both know the same tokens under the same ids."""
        return self._ids == other._ids

    def id_of(self, token: str) -> int | None:
        """Id of a token by its spelling in the file, or None."""
        return self._ids.get(token)

    def bytes_of(self, token_id: int) -> bytes:
        """The bytes that a token adds to a text; none for an id that no token has."""
        known = self._bytes.get(token_id)
        if known is None:
            if token_id in self.added:
                known = self.added[token_id].encode()
            else:
                token = self._base.get(token_id)
                known = b"" if token is None else self._to_bytes(token)
            self._bytes[token_id] = known
        return known

    def first_bytes(self, piece: bytes) -> bytes:
        """`piece` as it reads at the very start of a text: vocabularies that mark word beginnings
        (SentencePiece's) put a space before the first word, which was not in the text."""
        return self._first(piece)


def _base_tokens(model: Mapping[str, Any]) -> dict[int, str]:
    if model.get("type") == "Unigram":
        return {number: str(token) for number, (token, _) in enumerate(model["vocab"])}
    if model.get("type", "BPE") == "BPE":  # files written before 2020 do not name it
        return {int(id_): str(token) for token, id_ in model["vocab"].items()}
    raise TokenizerError(f"tokenizer.json: model type {model.get('type')!r} is not supported, only BPE and Unigram are")


def _decoder(
    decoder: Mapping[str, Any] | None,
) -> tuple[Callable[[str], bytes], Callable[[bytes], bytes]]:
    """(bytes of a base token, bytes of the first piece of a text) from the decoder chain of the file."""
    steps = _flatten(decoder)
    kinds = [step["type"] for step in steps]
    if kinds and set(kinds) <= {"ByteLevel", "Fuse"} and "ByteLevel" in kinds:
        return _byte_level_bytes, lambda piece: piece
    if not kinds or not set(kinds) <= {"Metaspace", "Replace", "ByteFallback", "Fuse", "Strip"}:
        raise TokenizerError(
            f"tokenizer.json: decoder {' + '.join(kinds) or 'null'} is not supported; ByteLevel and "
            "SentencePiece's (Metaspace, or Replace with ByteFallback) are"
        )
    replacements = [_replacement(step) for step in steps if step["type"] in ("Metaspace", "Replace")]
    fallback = "ByteFallback" in kinds

    def to_bytes(token: str) -> bytes:
        if fallback and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes([int(token[3:5], 16)])
        for old, new in replacements:
            token = token.replace(old, new)
        return token.encode()

    return to_bytes, _first_piece(steps)


def _flatten(decoder: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    if decoder is None:
        return []
    if decoder["type"] == "Sequence":
        return [step for inner in decoder["decoders"] for step in _flatten(inner)]
    return [decoder]


def _replacement(step: Mapping[str, Any]) -> tuple[str, str]:
    if step["type"] == "Metaspace":
        return str(step.get("replacement", "▁")), " "
    pattern = step["pattern"]
    if "String" not in pattern:
        raise TokenizerError(f"tokenizer.json: decoder Replace by the pattern {pattern} is not supported")
    return str(pattern["String"]), str(step["content"])


def _first_piece(steps: list[Mapping[str, Any]]) -> Callable[[bytes], bytes]:
    for step in steps:
        if step["type"] == "Metaspace" and _prepends(step):
            return lambda piece: piece.replace(b" ", b"")  # the library drops every mark of the first token
        if step["type"] == "Strip":
            content, start, stop = str(step["content"]).encode(), int(step["start"]), int(step["stop"])
            if stop or start > 1:
                raise TokenizerError(f"tokenizer.json: decoder Strip {dict(step)} is not supported")
            return lambda piece: piece.removeprefix(content) if start else piece
    return lambda piece: piece


def _prepends(step: Mapping[str, Any]) -> bool:
    return bool(step.get("prepend_scheme", "always") != "never" and step.get("add_prefix_space", True))


_ALPHABET = byte_alphabet()


def _byte_level_bytes(token: str) -> bytes:
    try:
        return bytes(_ALPHABET[character] for character in token)
    except KeyError:  # not spelled in the alphabet: the token is its own text
        return token.encode()
