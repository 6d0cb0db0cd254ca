"""Problems whose answers can be checked, with reasoning that computes them step by step, in English and Chinese.

Every problem is drawn from (seed, index) and belongs, by a hash of its kind and operands alone, either to training or
to the held-out tenth: no held-out problem is ever trained on in any wording. The operands in another order, or as a
part of another kind, are other problems.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable
from dataclasses import dataclass

HELD_OUT_SHARE = 10
"""One in so many sets of operands is held out."""

LANGUAGES = ("en", "zh")


@dataclass(frozen=True)
class Problem:
    """kind: one of KINDS. language: "en" or "zh". reasoning: between the think tags. answer: what is checked."""

    kind: str
    language: str
    question: str
    reasoning: str
    answer: str

    @property
    def messages(self) -> list[dict[str, str]]:
        """The conversation to learn: question, and reasoning with the answer after it, in DeepSeek-R1's form."""
        reply = f"The answer is {self.answer}." if self.language == "en" else f"答案是{self.answer}。"
        answer = f"<think>\n{self.reasoning}\n</think>\n\n{reply}"
        return [{"role": "user", "content": self.question}, {"role": "assistant", "content": answer}]

    def to_json(self) -> str:
        """One line of a problem file, which `msds train`, `msds reinforce` and `msds evaluate` read."""
        line = {"kind": self.kind, "language": self.language, "answer": self.answer, "messages": self.messages}
        return json.dumps(line, ensure_ascii=False)


def generate_problems(count: int, *, seed: int, held_out: bool, kinds: tuple[str, ...] | None = None) -> list[Problem]:
    """`count` problems, each kind and language equally often, drawn from the training or the held-out operands."""
    wanted = kinds or tuple(KINDS)
    return [draw_problem(seed, index, wanted[index % len(wanted)], held_out=held_out) for index in range(count)]


def draw_problem(seed: int, index: int, kind: str, *, held_out: bool) -> Problem:
    """Problem `index` of a seed."""
    chance = random.Random(f"{seed}:{index}:{kind}:{held_out}")
    language = LANGUAGES[chance.randrange(2)]
    while True:
        operands, problem = KINDS[kind](chance, language)
        if _is_held_out(kind, operands) == held_out:
            return problem


def _is_held_out(kind: str, operands: tuple[int, ...]) -> bool:
    digest = hashlib.sha256(f"{kind}:{operands}".encode()).digest()
    return int.from_bytes(digest[:8], "big") % HELD_OUT_SHARE == 0


# --- arithmetic, written out ---------------------------------------------------------------------------------------


def _number(chance: random.Random, digits: int) -> int:
    """Every number of digits up to `digits` has a fair chance."""
    length = chance.randint(1, digits)
    return chance.randint(0 if length == 1 else 10 ** (length - 1), 10**length - 1)


def written_sum(a: int, b: int) -> str:
    """a + b column by column, units first, with the carry: `7+8=15,1 4+5+1=10,1 1 =105`."""
    steps, carry = [], 0
    x, y = str(a)[::-1], str(b)[::-1]
    for place in range(max(len(x), len(y))):
        terms = [text[place] for text in (x, y) if place < len(text)] + (["1"] if carry else [])
        total = sum(int(term) for term in terms)
        carry = total // 10
        steps.append(f"{'+'.join(terms)}={total}")
    return f"{a}+{b}: " + " ".join(steps) + f" ={a + b}"


def written_difference(a: int, b: int) -> str:
    """a - b for a >= b, column by column, units first; a borrow makes the next column one less."""
    steps, borrow = [], 0
    x, y = str(a)[::-1], str(b)[::-1]
    for place in range(len(x)):
        top, below = int(x[place]), int(y[place]) if place < len(y) else 0
        short = top - below - borrow < 0
        terms = f"{top + 10 if short else top}-{below}" + ("-1" if borrow else "")
        steps.append(f"{terms}={top - below - borrow + (10 if short else 0)}")
        borrow = int(short)
    return f"{a}-{b}: " + " ".join(steps) + f" ={a - b}"


def written_product(a: int, b: int) -> str:
    """a * b for one-digit b: each digit's product with its carry, units first."""
    steps, carry = [], 0
    for digit in str(a)[::-1]:
        total = int(digit) * b + carry
        steps.append(f"{digit}*{b}" + (f"+{carry}" if carry else "") + f"={total}")
        carry = total // 10
    return f"{a}*{b}: " + " ".join(steps) + f" ={a * b}"


# --- kinds ---------------------------------------------------------------------------------------------------------

Drawn = tuple[tuple[int, ...], Problem]


def _pick(chance: random.Random, language: str, english: tuple[str, ...], chinese: tuple[str, ...]) -> str:
    return chance.choice(english if language == "en" else chinese)


def _addition(chance: random.Random, language: str) -> Drawn:
    a, b = _number(chance, 3), _number(chance, 3)
    question = _pick(
        chance,
        language,
        ("What is {a} + {b}?", "Calculate {a} + {b}.", "Add {a} and {b}.", "{a} + {b} = ?"),
        ("{a} + {b} 等于多少？", "计算 {a} + {b}。", "{a} 加 {b} 是多少？", "{a} + {b} = ?"),
    ).format(a=a, b=b)
    return (a, b), Problem("addition", language, question, written_sum(a, b), str(a + b))


def _subtraction(chance: random.Random, language: str) -> Drawn:
    a, b = sorted((_number(chance, 3), _number(chance, 3)), reverse=True)
    question = _pick(
        chance,
        language,
        ("What is {a} - {b}?", "Calculate {a} - {b}.", "Subtract {b} from {a}.", "{a} - {b} = ?"),
        ("{a} - {b} 等于多少？", "计算 {a} - {b}。", "{a} 减 {b} 是多少？", "{a} - {b} = ?"),
    ).format(a=a, b=b)
    return (a, b), Problem("subtraction", language, question, written_difference(a, b), str(a - b))


def _multiplication(chance: random.Random, language: str) -> Drawn:
    a, b = _number(chance, 3), chance.randint(2, 9)
    question = _pick(
        chance,
        language,
        ("What is {a} * {b}?", "Calculate {a} * {b}.", "Multiply {a} by {b}.", "{a} * {b} = ?"),
        ("{a} * {b} 等于多少？", "计算 {a} * {b}。", "{a} 乘 {b} 是多少？", "{a} * {b} = ?"),
    ).format(a=a, b=b)
    return (a, b), Problem("multiplication", language, question, written_product(a, b), str(a * b))


def _comparison(chance: random.Random, language: str) -> Drawn:
    a = _number(chance, 4)
    b = a
    while b == a:
        near = chance.random() < 0.5  # numbers that begin alike need looking at more than one digit
        b = max(0, a + chance.randint(-30, 30)) if near else _number(chance, 4)
    larger = chance.random() < 0.5
    question = _pick(
        chance,
        language,
        ("Which is {which}, {a} or {b}?", "Of {a} and {b}, which is {which}?"),
        ("{a} 和 {b} 哪个更{which}？", "哪个更{which}：{a} 还是 {b}？"),
    )
    which = {"en": ("larger", "smaller"), "zh": ("大", "小")}[language][0 if larger else 1]
    answer = max(a, b) if larger else min(a, b)
    text = question.format(which=which, a=a, b=b)
    return (a, b), Problem("comparison", language, text, _compared(a, b) + f" {which} ={answer}", str(answer))


def _compared(a: int, b: int) -> str:
    """Lengths first, then digits from the left up to the first that differ."""
    x, y = str(a), str(b)
    if len(x) != len(y):
        return f"{x} {y}: {len(x)}{'>' if len(x) > len(y) else '<'}{len(y)}"
    steps = []
    for left, right in zip(x, y, strict=True):
        sign = "=" if left == right else ">" if left > right else "<"
        steps.append(f"{left}{sign}{right}")
        if left != right:
            break
    return f"{x} {y}: " + " ".join(steps)


def _equation(chance: random.Random, language: str) -> Drawn:
    """x + a = b, x - a = b, or a x = b with a whole solution."""
    form = chance.randrange(3)
    x = chance.randint(1, 99) if form == 2 else _number(chance, 3)
    if form == 0:
        a = _number(chance, 3)
        equation, reasoning = f"x + {a} = {x + a}", f"x={x + a}-{a} " + written_difference(x + a, a)
    elif form == 1:
        a = min(_number(chance, 3), x)
        equation, reasoning = f"x - {a} = {x - a}", f"x={x - a}+{a} " + written_sum(x - a, a)
    else:
        a = chance.randint(2, 9)
        equation, reasoning = f"{a}x = {a * x}", f"x={a * x}/{a} " + written_quotient(a * x, a)
    question = _pick(
        chance,
        language,
        ("Solve {e} for x.", "If {e}, what is x?", "Find x: {e}"),
        ("解方程 {e}。", "如果 {e}，x 是多少？", "求 x：{e}"),
    ).format(e=equation)
    return (form, a, x), Problem("equation", language, question, reasoning, str(x))


def written_quotient(a: int, b: int) -> str:
    """a / b without remainder, digit by digit from the left: `184/8: 18/8=2r2 24/8=3r0 =23`."""
    steps: list[str] = []
    rest, started = 0, False
    for digit in str(a):
        rest = rest * 10 + int(digit)
        if not started and rest < b and len(steps) == 0 and a >= b:
            continue
        started = True
        steps.append(f"{rest}/{b}={rest // b}r{rest % b}")
        rest %= b
    return f"{a}/{b}: " + " ".join(steps) + f" ={a // b}"


NAMES = {"en": ("Tom", "Anna", "Li", "Sam", "Mia"), "zh": ("小明", "小红", "小李", "小华", "小美")}
THINGS = {"en": ("apples", "books", "coins", "cards", "pens"), "zh": ("苹果", "书", "硬币", "卡片", "笔")}


def _story(chance: random.Random, language: str) -> Drawn:
    """Two steps: so many, some more or fewer, or several times as many."""
    name, thing = chance.choice(NAMES[language]), chance.choice(THINGS[language])
    form = chance.randrange(3)
    if form == 0:  # get, then give
        a, b = _number(chance, 2), _number(chance, 2)
        c = chance.randint(0, a + b)
        answer, reasoning = a + b - c, f"{written_sum(a, b)}; {written_difference(a + b, c)}"
        english = "{n} has {a} {t}, gets {b} more and gives away {c}. How many {t} are left?"
        chinese = "{n}有{a}个{t}，又得到{b}个，送出{c}个。还剩几个{t}？"
    elif form == 1:  # boxes
        a, b, c = chance.randint(2, 9), chance.randint(2, 9), _number(chance, 2)
        answer, reasoning = a * b + c, f"{written_product(b, a)}; {written_sum(a * b, c)}"
        english = "{n} has {a} boxes with {b} {t} each, and {c} more {t}. How many {t} in all?"
        chinese = "{n}有{a}盒{t}，每盒{b}个，另外还有{c}个。一共有几个{t}？"
    else:  # shared out
        b, each, c = chance.randint(2, 9), chance.randint(1, 30), 0
        a = b * each
        answer, reasoning = each, written_quotient(a, b)
        english = "{n} shares {a} {t} equally among {b} friends. How many {t} does each get?"
        chinese = "{n}把{a}个{t}平均分给{b}个朋友。每人得到几个{t}？"
    question = (english if language == "en" else chinese).format(n=name, t=thing, a=a, b=b, c=c)
    return (form, a, b, c), Problem("story", language, question, reasoning, str(answer))


KINDS: dict[str, Callable[[random.Random, str], Drawn]] = {
    "addition": _addition,
    "subtraction": _subtraction,
    "multiplication": _multiplication,
    "comparison": _comparison,
    "equation": _equation,
    "story": _story,
}
"""Every kind of problem and what draws one: its operands, and the problem."""
