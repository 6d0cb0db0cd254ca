"""Encoding is the library's but for control tokens, which only we can place; decoding is exact in bytes."""

import json
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Library

from msds.errors import PromptError, TokenizerError
from msds.text.tokenizer import Tokenizer, has_tokenizer
from tests.text import tiny
from tests.text.tiny import BOS, EOS, USER

WORDS = ["hello world", " hello", "你好", "    ", "\n\n", "é", "🙂👩‍🚀", "<", "｜>", "12345", "�", "\x00", "don't"]


def library(tokenizer_json):
    return Library.from_str(json.dumps(tokenizer_json))


def texts(tokenizer, *, controls):
    pieces = st.sampled_from(WORDS) | st.text(max_size=5)
    if controls:
        pieces |= st.sampled_from(sorted(tokenizer.control_ids))
    return st.lists(pieces, max_size=8).map("".join)


@settings(deadline=None)
@given(text=texts(tiny.byte_level(), controls=True))
def test_encoding_equals_the_library(text):
    expected = library_of_tiny().encode(text, add_special_tokens=False).ids
    assert tiny.byte_level().encode(text, bos=False) == expected


@settings(deadline=None)
@given(text=texts(tiny.byte_level(), controls=True))
def test_plain_text_never_becomes_control_and_loses_nothing(text):
    tokenizer = tiny.byte_level()
    ids = tokenizer.encode_plain(text)
    assert not set(ids) & set(tokenizer.control_ids.values())
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()
    if not any(spelling in text for spelling in tokenizer.control_ids):
        assert ids == library_of_tiny().encode(text, add_special_tokens=False).ids


def library_of_tiny():
    return library(tiny.byte_level_json())


def test_runs_of_spaces_are_vocabulary_and_not_control():
    tokenizer = tiny.byte_level()
    assert "    " not in tokenizer.control_ids
    assert tokenizer.encode_plain("    ") == [tokenizer.token_id("    ")]


def test_turns_that_the_file_does_not_call_special_are_control():
    tokenizer = tiny.byte_level()
    user = tokenizer.token_id(USER)
    assert tokenizer.encode(USER, bos=False) == [user]
    assert len(tokenizer.encode_plain(USER)) > 1
    assert user not in tokenizer.special_ids
    assert tokenizer.decode([user]) == USER


@pytest.mark.parametrize("ignore_merges", [True, False])
def test_control_tokens_inside_the_vocabulary_cannot_be_spelled(ignore_merges):
    """`<s>` is in the vocabulary, a merge makes it, and the whole word matches: three ways to forge it."""
    parts = tiny.byte_level_json(more_merges=["s >", "< s>"])
    parts["model"]["ignore_merges"] = ignore_merges
    bos = parts["model"]["vocab"]["<s>"]
    parts["added_tokens"].append(tiny.added(bos, "<s>", special=True))
    tokenizer = Tokenizer(parts, {})
    assert library(parts).encode("<s>", add_special_tokens=False).ids == [bos]
    assert tokenizer.encode("<s>") == [bos]
    assert bos not in tokenizer.encode_plain("<s>")
    assert tokenizer.decode(tokenizer.encode_plain("<s>")) == "<s>"


def test_the_longest_of_overlapping_control_tokens_wins():
    parts = tiny.byte_level_json()
    new = max(token["id"] for token in parts["added_tokens"]) + 1
    parts["added_tokens"] += [tiny.added(new + n, "<a>"[: 2 + n], special=True) for n in range(2)]
    assert Tokenizer(parts).encode("<a><a") == [new + 1, new] == library(parts).encode("<a><a").ids


def test_unigram_control_tokens_cannot_be_spelled():
    pieces = [["<unk>", 0.0], ["<s>", 0.0], ["▁", -2.0], ["<", -3.0], ["s", -3.0], [">", -3.0]]
    marker = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
    parts = tiny.sentencepiece_json() | {
        "model": {"type": "Unigram", "unk_id": 0, "vocab": pieces},
        "normalizer": None,
        "pre_tokenizer": marker,
        "decoder": marker,
        "added_tokens": [tiny.added(n, pieces[n][0], special=True) for n in range(2)],
    }
    tokenizer = Tokenizer(parts, {})
    assert tokenizer.encode("<s>", bos=False) == [1]
    assert tokenizer.encode_plain("<s>") == [2, 3, 4, 5]
    assert tokenizer.decode([2, 3, 4, 5]) == "<s>"


@pytest.mark.parametrize(
    ("add_bos_token", "adds", "expected"),
    [(True, False, 1), (True, True, 1), (False, True, 0), (False, False, 0), (None, True, 1), (None, False, 0)],
)
def test_bos_exactly_as_often_as_the_files_say(add_bos_token, adds, expected):
    parts = tiny.byte_level_json()
    if adds:
        template = tiny.sentencepiece_json()["post_processor"]
        parts["post_processor"] = json.loads(json.dumps(template).replace("<s>", BOS).replace("[1]", "[0]"))
    config = tiny.byte_level_config()
    if add_bos_token is None:
        del config["add_bos_token"]
    else:
        config["add_bos_token"] = add_bos_token
    tokenizer = Tokenizer(parts, config)
    hello = tokenizer.encode_plain("hello")
    assert tokenizer.encode("hello") == [0] * expected + hello
    assert tokenizer.encode("hello", bos=False) == hello
    assert tokenizer.encode(BOS + "hello") == [0, *hello]  # never twice
    assert tokenizer.encode("") == [0] * expected


def test_named_tokens_are_strings_or_written_out():
    for config in (tiny.byte_level_config(), tiny.byte_level_config(bos_token=BOS, eos_token=EOS)):
        tokenizer = Tokenizer(tiny.byte_level_json(), config)
        assert (tokenizer.bos_id, tokenizer.eos_id) == (0, 1)
        assert tokenizer.named_tokens == {"bos_token": BOS, "eos_token": EOS, "pad_token": "<pad>"}
    assert Tokenizer(tiny.byte_level_json()).bos_id is None


def test_ids_without_a_token_decode_to_nothing():
    tokenizer = tiny.byte_level()
    assert tokenizer.vocab_size == max(tokenizer.control_ids.values()) + 2
    hello = tokenizer.encode_plain("hello")
    for outside in (tokenizer.vocab_size, 129_279, 2**31 - 1):
        assert tokenizer.decode([outside, *hello, outside]) == "hello"
        assert tokenizer.token_bytes(outside) == b""


def test_decode_leaves_special_tokens_out_unless_asked():
    tokenizer = tiny.byte_level()
    ids = tokenizer.encode(f"{BOS}hello{EOS}")
    assert tokenizer.decode(ids) == "hello"
    assert tokenizer.decode(ids, skip_special_tokens=False) == f"{BOS}hello{EOS}"


def test_a_cut_character_reads_as_one_replacement():
    tokenizer = tiny.byte_level()
    ids = [tokenizer.token_id(token) for token in ("ä½", "ł")]
    assert tokenizer.decode(ids) == "你"
    assert tokenizer.decode(ids[:1]) == "�"
    assert tokenizer.decode([*ids[:1], *ids]) == "�你"


@pytest.mark.parametrize("metaspace", [True, False])
@settings(deadline=None)
@given(text=texts(tiny.sentencepiece(), controls=True))
def test_sentencepiece_layouts_equal_the_library(metaspace, text):
    parts = tiny.sentencepiece_json(metaspace=metaspace)
    tokenizer, reference = Tokenizer(parts, {}), library(parts)
    ids = tokenizer.encode(text)
    assert ids == reference.encode(text).ids or text.startswith("<s>")
    # where the bytes are no UTF-8 the library writes one U+FFFD for each, so compare whole texts only
    assert tokenizer.decode(ids) == reference.decode(ids)


def test_leading_space_of_a_continuation_is_kept():
    tokenizer = tiny.sentencepiece()
    ids = tokenizer.encode("he", bos=False)
    assert tokenizer.decode(ids) == "he"
    assert tokenizer.decode(ids, continuation=True) == " he"
    assert tokenizer.decode(tokenizer.encode("he")) == "he"  # BOS is left out before the space is looked at


def test_metaspace_decoder_equals_the_library():
    marker = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
    parts = tiny.sentencepiece_json() | {"decoder": marker}
    tokenizer, reference = Tokenizer(parts, {}), library(parts)
    for text in ("he", "he  he", "  he", ""):
        ids = tokenizer.encode_plain(text)
        assert tokenizer.decode(ids) == reference.decode(ids)


def test_the_file_cannot_truncate_or_pad():
    cut = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    pad = {"strategy": {"Fixed": 9}, "direction": "Right", "pad_to_multiple_of": None}
    pad |= {"pad_id": 1, "pad_type_id": 0, "pad_token": EOS}
    parts = tiny.byte_level_json(truncation=cut, padding=pad)
    assert Tokenizer(parts).encode("hello world, hello") == tiny.byte_level().encode_plain("hello world, hello")


def test_added_tokens_of_the_config_are_known():
    parts = tiny.byte_level_json()
    new = max(token["id"] for token in parts["added_tokens"]) + 1
    config = {"added_tokens_decoder": {str(new): {"content": "<new>", "special": True}}}
    assert Tokenizer(parts, config).encode("<new>") == [new]


def test_special_tokens_map_fills_in(tmp_path):
    names = json.dumps({"bos_token": BOS, "eos_token": "<pad>"})
    folder = tiny.write_folder(tmp_path, tiny.byte_level_json(), {"eos_token": EOS}, special_tokens_map__json=names)
    assert has_tokenizer(folder)
    tokenizer = Tokenizer.open(folder)
    assert (tokenizer.bos_id, tokenizer.eos_id) == (0, 1)


def without(parts, *path):
    inner = parts
    for key in path[:-1]:
        inner = inner[key]
    del inner[path[-1]]
    return parts


@pytest.mark.parametrize(
    ("parts", "config", "message"),
    [
        (tiny.byte_level_json(decoder=None), {}, "decoder null is not supported"),
        (tiny.byte_level_json(decoder={"type": "WordPiece"}), {}, "decoder WordPiece is not supported"),
        (tiny.byte_level_json(model={"type": "WordLevel", "vocab": {}}), {}, "model type 'WordLevel'"),
        (tiny.byte_level_json(pre_tokenizer={"type": "Nonsense"}), {}, "cannot be used"),
        (tiny.byte_level_json(), {"bos_token": "<none>"}, "bos_token '<none>' is not in"),
        (tiny.byte_level_json(), {"bos_token": 7}, "7 is not a token"),
        (tiny.byte_level_json(), {"add_bos_token": True}, "there is no bos_token"),
        (
            tiny.byte_level_json(added_tokens=[tiny.added(5000, "<far>", special=True)]),
            {},
            "'<far>' has id 5000",
        ),
    ],
)
def test_files_that_cannot_be_used(parts, config, message):
    with pytest.raises(TokenizerError, match=message):
        Tokenizer(parts, config)


def test_folders_without_a_usable_tokenizer(tmp_path):
    assert not has_tokenizer(tmp_path)
    with pytest.raises(TokenizerError, match=r"no tokenizer\.json in .*token ids work without"):
        Tokenizer.open(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    with pytest.raises(TokenizerError, match=r"tokenizer\.model alone is not supported"):
        Tokenizer.open(tmp_path)
    for text, message in [("{", "cannot be read as JSON"), ("[]", "a JSON object, not list"), ("{}", "no model")]:
        (tmp_path / "tokenizer.json").write_text(text)
        with pytest.raises(TokenizerError, match=message):
            Tokenizer.open(tmp_path)


def test_lone_surrogates_are_refused():
    with pytest.raises(PromptError, match=r"lone surrogate U\+D83D at character 2"):
        tiny.byte_level().encode("ab\ud83d")


def test_importing_the_module_loads_no_library():
    code = (
        "import sys, msds.text.chat, msds.text.stops; print({'tokenizers', 'jinja2', 'mindspore'} & set(sys.modules))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "set()"


@pytest.mark.parametrize("name", tiny.REAL_NAMES)
@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_real_tokenizers_equal_the_library(name, data):
    tokenizer = tiny.real(name)
    reference = real_library(name)
    text = data.draw(texts(tokenizer, controls=True))
    ids = tokenizer.encode(text, bos=False)
    assert ids == reference.encode(text, add_special_tokens=False).ids
    for skip in (True, False):
        assert tokenizer.decode(ids, skip_special_tokens=skip) == reference.decode(ids, skip_special_tokens=skip)
    plain = tokenizer.encode_plain(text)
    assert not set(plain) & set(tokenizer.control_ids.values())
    normalised = text if reference.normalizer is None else reference.normalizer.normalize_str(text)
    assert tokenizer.decode(plain) == normalised


_LIBRARIES = {}


def real_library(name):
    if name not in _LIBRARIES:
        _LIBRARIES[name] = Library.from_file(str(tiny.real_folder(name) / "tokenizer.json"))
    return _LIBRARIES[name]


def test_real_deepseek_facts():
    tokenizer = tiny.real("deepseek-r1")
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.vocab_size) == (0, 1, 128_815)
    assert tokenizer.encode("Hello,") == [0, 19923, 14]
    assert tokenizer.encode_plain("<think>") != [128_798] == tokenizer.encode("<think>", bos=False)
    assert "<think>" not in tiny.real("deepseek-v3").control_ids
    assert tokenizer.decode(range(128_815, 129_280)) == ""
    assert tiny.real("deepseek-r1-distill-qwen-7b").encode("Hi")[0] == 151_646
