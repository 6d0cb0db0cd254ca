"""Joined deltas are the whole text, no delta cuts a character, and the cost does not grow with the length."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from msds.text.detokenizer import Detokenizer
from tests.text import tiny

TOKENIZERS = {"byte-level": tiny.byte_level, "sentencepiece": tiny.sentencepiece}


def stream(tokenizer, ids, *, sizes=None, **options):
    """The deltas of `ids` pushed one by one, or in groups of `sizes`; the last one is from finish."""
    detokenizer = Detokenizer(tokenizer, **options)
    ids, deltas = list(ids), []
    for size in sizes or [1] * len(ids):
        deltas.append(detokenizer.push(ids[:size]))
        ids = ids[size:]
    deltas.append(detokenizer.push(ids))
    return [*deltas, detokenizer.finish()]


@pytest.mark.parametrize("kind", TOKENIZERS)
@settings(deadline=None)
@given(text=st.text(), data=st.data())
def test_joined_deltas_are_the_text(kind, text, data):
    tokenizer = TOKENIZERS[kind]()
    ids = tokenizer.encode_plain(text)
    sizes = data.draw(st.none() | st.lists(st.integers(0, 4), max_size=len(ids)))
    deltas = stream(tokenizer, ids, sizes=sizes, continuation=False)
    assert "".join(deltas) == text == tokenizer.decode(ids)
    assert deltas[-1] == ""
    assert all("�" not in delta for delta in deltas) or "�" in text


@pytest.mark.parametrize("kind", TOKENIZERS)
@settings(deadline=None)
@given(data=st.data(), skip=st.booleans(), continuation=st.booleans())
def test_any_ids_stream_as_they_decode(kind, data, skip, continuation):
    """Any ids: broken UTF-8, cut characters, control tokens in between, ids without a token."""
    tokenizer = TOKENIZERS[kind]()
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 2), max_size=12))
    whole = tokenizer.decode(ids, skip_special_tokens=skip, continuation=continuation)
    assert "".join(stream(tokenizer, ids, skip_special_tokens=skip, continuation=continuation)) == whole


def byte_tokens(tokenizer, *groups):
    """Ids of single-byte tokens for each group of hexadecimal bytes."""
    alphabet = {byte: character for character, byte in tiny.byte_alphabet().items()}
    return [[tokenizer.token_id(alphabet[byte]) for byte in bytes.fromhex(group)] for group in groups]


def test_a_character_comes_out_whole():
    tokenizer = tiny.byte_level()
    detokenizer = Detokenizer(tokenizer)
    head, tail = byte_tokens(tokenizer, "E4", "BD A0")
    assert [detokenizer.push(head), detokenizer.push(tail), detokenizer.finish()] == ["", "你", ""]


def test_joined_emoji_show_no_replacement_at_any_point():
    tokenizer = tiny.byte_level()
    groups = byte_tokens(tokenizer, "F0 9F", "91 A9", "E2 80 8D", "F0 9F 9A 80")
    detokenizer = Detokenizer(tokenizer)
    assert [detokenizer.push(group) for group in groups] == ["", "👩", "\u200d", "🚀"]


def test_a_cut_at_the_end_is_one_replacement_in_both_modes():
    tokenizer = tiny.byte_level()
    for cut in ("E4", "E4 BD", "F0 9F 9A"):
        [ids] = byte_tokens(tokenizer, "41" + cut)
        assert "".join(stream(tokenizer, ids)) == "A�" == tokenizer.decode(ids)


def test_a_genuine_replacement_character_passes():
    tokenizer = tiny.byte_level()
    assert "".join(stream(tokenizer, tokenizer.encode_plain("a�b"))) == "a�b"


def test_a_special_token_inside_a_character_does_not_break_it():
    tokenizer = tiny.byte_level()
    [head, tail] = byte_tokens(tokenizer, "E4", "BD A0")
    assert "".join(stream(tokenizer, [*head, tokenizer.eos_id, *tail])) == "你"


def test_what_is_held_stays_below_one_character():
    """Linear time: nothing is kept but the bytes of one character, so no push can depend on the length."""
    tokenizer = tiny.byte_level()
    detokenizer = Detokenizer(tokenizer)
    for id_ in tokenizer.encode_plain("你好🙂" * 500):
        detokenizer.push([id_])
        assert len(detokenizer._decoder.getstate()[0]) <= 3


def test_leading_space_belongs_to_a_continuation():
    tokenizer = tiny.sentencepiece()
    ids = tokenizer.encode_plain("he he")
    assert "".join(stream(tokenizer, ids)) == " he he"
    assert "".join(stream(tokenizer, ids, continuation=False)) == "he he"
    padding = tokenizer.vocab_size
    assert "".join(stream(tokenizer, [padding, *ids], continuation=False)) == "he he"


def test_real_vocabulary_streams_chinese_and_emoji():
    tokenizer = tiny.real("deepseek-r1")
    text = "鑫龘𠮷 👩‍🚀🏳️‍🌈 naïve �"
    deltas = stream(tokenizer, tokenizer.encode_plain(text))
    assert "".join(deltas) == text
    assert sum("�" in delta for delta in deltas) == 1
