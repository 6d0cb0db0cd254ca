"""The corpus: every line of reasoning is true, held-out operands are never trained on, judging is exact."""

from __future__ import annotations

import re

import pytest

from msds.errors import TrainingError
from msds.text.reasoning import Start
from msds.train.tiny_r1.problems import KINDS, generate_problems
from msds.train.verifiable import Task, is_correct, read_tasks, split_reply

TRAINING = generate_problems(3000, seed=0, held_out=False)
HELD_OUT = generate_problems(3000, seed=1, held_out=True)
_STEP = re.compile(r"(\d+(?:[-+*/]\d+)+)=(\d+)(?:r(\d+))?")


@pytest.mark.parametrize("kind", KINDS)
def test_every_step_of_the_reasoning_is_true_and_leads_to_the_answer(kind: str) -> None:
    problems = [problem for problem in TRAINING + HELD_OUT if problem.kind == kind]
    assert len(problems) == 1000
    for problem in problems:
        steps = _STEP.findall(problem.reasoning)
        for terms, result, rest in steps:
            if "/" in terms:
                over, under = map(int, terms.split("/"))
                assert divmod(over, under) == (int(result), int(rest)), problem
            else:
                assert eval(terms) == int(result), problem  # digits and signs only, as the pattern says
        assert steps or kind == "comparison"
        assert problem.reasoning.endswith(f"={problem.answer}")


def test_answers_follow_from_the_question() -> None:
    for problem in TRAINING:
        numbers = [int(text) for text in re.findall(r"\d+", problem.question)]
        if problem.kind == "addition":
            assert int(problem.answer) == sum(numbers)
        if problem.kind == "multiplication":
            assert int(problem.answer) == numbers[0] * numbers[1]
        if problem.kind == "subtraction":
            assert int(problem.answer) == abs(numbers[0] - numbers[1])
        if problem.kind == "comparison":
            larger = any(word in problem.question for word in ("larger", "大"))
            assert int(problem.answer) == (max if larger else min)(numbers)


def test_held_out_operands_never_train() -> None:
    def operands(problem):  # type: ignore[no-untyped-def]
        return problem.kind, tuple(re.findall(r"\d+", problem.question))

    seen = {operands(problem) for problem in TRAINING if problem.kind in ("addition", "multiplication")}
    unseen = {operands(problem) for problem in HELD_OUT if problem.kind in ("addition", "multiplication")}
    assert len(seen) > 500
    assert not seen & unseen


def test_the_same_seed_gives_the_same_problems_in_both_languages() -> None:
    assert generate_problems(50, seed=7, held_out=True) == generate_problems(50, seed=7, held_out=True)
    assert generate_problems(50, seed=8, held_out=True) != generate_problems(50, seed=7, held_out=True)
    chinese = sum(problem.language == "zh" for problem in TRAINING)
    assert 0.4 < chinese / len(TRAINING) < 0.6


def test_its_own_answer_is_right_and_another_is_not() -> None:
    for problem in HELD_OUT[:200]:
        task = Task(tuple(problem.messages[:1]), problem.answer, problem.kind)
        text = problem.messages[1]["content"]
        content = split_reply(text, Start.OPEN).content
        assert is_correct(task, content)
        thought = text.split("</think>")[0]  # alone it is no answer
        assert not is_correct(task, split_reply(thought, Start.OPEN).content)
        head, _, tail = content.rpartition(problem.answer)
        assert not is_correct(task, f"{head}{int(problem.answer) + 1}{tail}")


@pytest.mark.parametrize(
    ("answer", "reply", "right"),
    [
        ("12", "It is 3 + 9 = 12.", True),
        ("12", "12 and not 13", False),
        ("1200", "so 1,200.", True),
        ("-3", "x = -3", True),
        ("12", "nothing", False),
        ("yes", "yes", True),
        ("yes", "yes!", False),
        (" yes ", "yes\n", True),
        ("9007199254740993", "9007199254740992", False),
        ("0.5", "it is .50", False),
        ("0.5", "it is 0.50", True),
    ],
)
def test_numbers_are_compared_as_numbers_words_as_they_are(answer: str, reply: str, right: bool) -> None:
    assert is_correct(Task((), answer, "all"), reply) is right


@pytest.mark.parametrize(
    ("text", "start", "content"),
    [
        ("a</think> b </think> c", Start.OPEN, "b </think> c"),
        ("no end", Start.OPEN, ""),
        ("no thought", Start.CLOSED, "no thought"),
        ("no thought", Start.MODEL, "no thought"),
        ("<think>a</think>b", Start.MODEL, "b"),
    ],
)
def test_the_prompt_decides_what_of_a_reply_is_thought(text: str, start: Start, content: str) -> None:
    assert split_reply(text, start).content == content


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[]",
        '{"messages": [], "answer": "1"}',
        '{"messages": [{"role": "user", "content": "?"}]}',
        '{"messages": [{"role": "assistant", "content": "?"}], "answer": "1"}',
        '{"messages": [{"role": "user", "content": "?"}], "answer": 1}',
        '{"messages": [{"role": "user", "content": "?"}], "answer": " "}',
        '{"messages": [{"role": "user", "content": "?"}], "answer": "1", "tools": [{}]}',
    ],
)
def test_a_bad_line_is_named(tmp_path, line: str) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "tasks.jsonl"
    path.write_text(HELD_OUT[0].to_json() + "\n" + line + "\n")
    with pytest.raises(TrainingError, match="line 2"):
        read_tasks(path)


def test_files_that_hold_nothing(tmp_path) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(TrainingError, match="cannot be read"):
        read_tasks(tmp_path / "none.jsonl")
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(TrainingError, match="holds no task"):
        read_tasks(tmp_path / "empty.jsonl")
