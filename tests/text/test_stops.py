"""Stop strings end the text where they are complete first, whatever the deltas are."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from msds.errors import SamplingError
from msds.text.stops import StopMatcher


def run(stops, deltas, **options):
    matcher = StopMatcher(stops, **options)
    sent = [matcher.push(delta) for delta in deltas]
    return "".join(sent) + matcher.finish(), matcher.stopped, sent


def plain(stops, text, include):
    """The definition, on the whole text: the smallest end, then the longest stop."""
    ends = [(end, -len(s), s) for s in stops for end in range(len(text) + 1) if text[:end].endswith(s)]
    if not ends:
        return text, None
    end, _, stop = min(ends)
    return text[:end] if include else text[: end - len(stop)], stop


@settings(deadline=None, max_examples=400)
@given(
    stops=st.lists(st.text("ab你", min_size=1, max_size=4), max_size=4),
    deltas=st.lists(st.text("ab你c", max_size=5), max_size=8),
    include=st.booleans(),
)
def test_streamed_equals_whole_under_any_split(stops, deltas, include):
    text, stopped, sent = run(stops, deltas, include_stop=include)
    assert (text, stopped) == plain(stops, "".join(deltas), include)
    # what was sent at any time is a beginning of the final text, and nothing sendable was kept back
    complete = ""
    for number, delta in enumerate(sent):
        complete += delta
        so_far = "".join(deltas[: number + 1])
        if plain(stops, so_far, include)[1] is None:
            held = so_far[len(complete) :]
            assert so_far == complete + held
            assert not held or any(stop.startswith(held) for stop in stops)


def test_a_stop_across_tokens_never_leaks():
    text, stopped, sent = run(["</answer>"], ["4", "2</", "ans", "wer", "> more"])
    assert (text, stopped) == ("42", "</answer>")
    assert sent == ["4", "2", "", "", ""]


def test_text_that_turns_out_not_to_be_a_stop_is_sent():
    text, stopped, sent = run(["STOP"], ["a ST", "O", "RM"])
    assert (text, stopped, sent) == ("a STORM", None, ["a ", "", "STORM"])


def test_held_text_is_given_at_the_end():
    matcher = StopMatcher(["\n\n"])
    assert (matcher.push("end\n"), matcher.held, matcher.finish(), matcher.held) == ("end", "\n", "\n", "")


def test_the_longer_stop_does_not_hide_the_earlier():
    assert run(["world and all", "lo"], ["hello world and all"])[:2] == ("hel", "lo")
    assert run(["bcde", "c"], ["abcde"])[:2] == ("ab", "c")
    assert run(["c", "abc"], ["xabc"])[:2] == ("x", "abc")  # complete together: the longest


def test_include_keeps_the_stop_and_nothing_after_it():
    assert run(["."], ["One. Two."], include_stop=True)[0] == "One."


def test_nothing_is_sent_after_a_stop():
    matcher = StopMatcher(["x"])
    assert [matcher.push("ax"), matcher.push("b"), matcher.finish()] == ["a", "", ""]


def test_before_min_tokens_a_stop_is_text():
    matcher = StopMatcher(["ab"])
    assert matcher.push("ab", armed=False) + matcher.push("xa", armed=False) == "abx"
    assert (matcher.push("b"), matcher.stopped) == ("", "ab")  # complete when it counts
    matcher = StopMatcher(["aba"])
    assert (matcher.push("xaba", armed=False), matcher.held) == ("xab", "a")
    assert (matcher.push("ba"), matcher.stopped) == ("", "aba")  # the second one begins inside the first


def test_overlapping_starts_are_found():
    assert run(["aab"], list("aaab"))[:2] == ("a", "aab")
    assert run(["abab", "zz"], ["aba", "bab"])[:2] == ("", "abab")


def test_an_empty_stop_is_refused():
    with pytest.raises(SamplingError, match="empty string"):
        StopMatcher(["a", ""])
