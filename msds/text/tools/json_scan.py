"""Strict JSON, one character at a time: where an object ends, or where it stops being JSON."""

import re
from enum import Enum

_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_NUMBER_CHARACTERS = frozenset("+-.0123456789eE")
_LITERALS = {"t": "true", "f": "false", "n": "null"}
_HEX = frozenset("0123456789abcdefABCDEF")
_SPACE = frozenset(" \t\r\n")


class Scan(Enum):
    """The state of a scan: `MORE` is missing, the object is `DONE`, or the text is `BROKEN` as JSON."""

    MORE = "more"
    DONE = "done"
    BROKEN = "broken"


class JsonScanner:
    """Follows one JSON object through pieces of text; each character costs the same at any length and depth."""

    def __init__(self) -> None:
        self._closers: list[str] = []  # of the objects and arrays that are open
        self._expect = self._start
        self._token = ""  # the number or literal that is being read
        self._hex_left = 0
        self._is_key = False

    def feed(self, text: str) -> tuple[int, Scan]:
        """(characters that belong to the object, state). A broken character is not counted."""
        for number, character in enumerate(text):
            if not self._expect(character):
                return number, Scan.BROKEN
            if not self._closers:
                return number + 1, Scan.DONE
        return len(text), Scan.MORE

    def _start(self, character: str) -> bool:
        return character == "{" and self._value(character)

    def _value(self, character: str) -> bool:
        if character in _SPACE:
            return True
        if character == "{":
            self._closers.append("}")
            self._expect = self._first_key
        elif character == "[":
            self._closers.append("]")
            self._expect = self._first_item
        elif character == '"':
            self._is_key = False
            self._expect = self._string
        elif character in _LITERALS:
            self._token = character
            self._expect = self._literal
        elif character == "-" or "0" <= character <= "9":
            self._token = character
            self._expect = self._number
        else:
            return False
        return True

    def _first_item(self, character: str) -> bool:
        return self._close(character) if character == "]" else self._value(character)

    def _first_key(self, character: str) -> bool:
        return self._close(character) if character == "}" else self._key(character)

    def _key(self, character: str) -> bool:
        if character == '"':
            self._is_key = True
            self._expect = self._string
            return True
        return character in _SPACE

    def _string(self, character: str) -> bool:
        if character == '"':
            self._expect = self._colon if self._is_key else self._after
        elif character == "\\":
            self._expect = self._escape
        return character >= " "

    def _escape(self, character: str) -> bool:
        if character == "u":
            self._hex_left = 4
            self._expect = self._hex
            return True
        self._expect = self._string
        return character in '"\\/bfnrt'

    def _hex(self, character: str) -> bool:
        self._hex_left -= 1
        if not self._hex_left:
            self._expect = self._string
        return character in _HEX

    def _colon(self, character: str) -> bool:
        if character == ":":
            self._expect = self._value
            return True
        return character in _SPACE

    def _literal(self, character: str) -> bool:
        self._token += character
        literal = _LITERALS[self._token[0]]
        if self._token == literal:
            self._expect = self._after
        return literal.startswith(self._token)

    def _number(self, character: str) -> bool:
        if character in _NUMBER_CHARACTERS:
            self._token += character
            return True
        return bool(_NUMBER.fullmatch(self._token)) and self._after(character)

    def _after(self, character: str) -> bool:
        """After a value: a comma, or what closes the innermost object or array."""
        if character == ",":
            self._expect = self._key if self._closers[-1] == "}" else self._value
            return True
        if character in _SPACE:
            self._expect = self._after
            return True
        return self._close(character)

    def _close(self, character: str) -> bool:
        if character != self._closers[-1]:
            return False
        self._closers.pop()
        self._expect = self._after
        return True
