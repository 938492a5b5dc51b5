"""Makes the word problems of this example: `python examples/math_agent/problems.py` writes `data/`.

Five kinds of arithmetic, several wordings each, and in two of five problems a sentence with a number that does not
matter. A checksum of the question decides whether it may be trained on, so no held-out question is ever trained on,
whatever the seed.
"""

from __future__ import annotations

import json
import random
import zlib
from dataclasses import dataclass
from pathlib import Path

NAMES = "Ava Ben Cora Dan Ella Finn Gia Hugo Ivy Jack Kira Liam Maya Noah Olga Paul Rosa Sam Tina Uma".split()
ITEMS = "apples books coins cards eggs pens shells stamps stones toys".split()
BOXES = "bags boxes crates jars packs trays".split()

WORDINGS: dict[str, list[str]] = {
    "{a} + {b}": [
        "{n} has {a} {i}. {m} gives {n} {b} more {i}. How many {i} does {n} have now?",
        "There are {a} {i} on a table and {b} {i} on a shelf. How many {i} are there in total?",
        "{n} found {a} {i} and {m} found {b} {i}. How many {i} did they find together?",
        "{n} has {a} {i}. {m} has {b} more {i} than {n}. How many {i} does {m} have?",
    ],
    "{a} - {b}": [
        "{n} has {a} {i}. {n} gives {b} {i} to {m}. How many {i} does {n} have left?",
        "There were {a} {i} on a table. {n} took {b} of them. How many {i} remain?",
        "{n} has {a} {i}. {m} has {b} fewer {i} than {n}. How many {i} does {m} have?",
        "{n} wants {a} {i} and has {b} {i}. How many more {i} does {n} need?",
    ],
    "{a} * {b}": [
        "{n} has {a} {x} with {b} {i} in each. How many {i} does {n} have?",
        "Each day {n} buys {a} {i}. How many {i} does {n} buy in {b} days?",
        "There are {a} rows of {b} {i}. How many {i} are there in total?",
    ],
    "{a} * {b} + {c}": [
        "{n} has {a} {x} with {b} {i} in each, and {c} loose {i}. How many {i} does {n} have?",
        "{n} buys {a} {x} of {b} {i}. {m} gives {n} {c} more {i}. How many {i} does {n} have now?",
    ],
    "{a} * {b} - {c}": [
        "{n} has {a} {x} with {b} {i} in each and gives {c} {i} to {m}. How many {i} does {n} have left?",
    ],
}
FREQUENCY = [3, 3, 3, 2, 1]
DISTRACTORS = [
    "{n} is {d} years old.",
    "It is {d} degrees outside.",
    "The table is {d} cm wide.",
    "{m} also has {d} pencils.",
]


@dataclass(frozen=True)
class Problem:
    """A word problem and how it is solved."""

    question: str
    expression: str
    answer: int
    distractor: int | None
    """A number in the question that does not matter."""


def make_problem(rng: random.Random) -> Problem:
    """Draw one problem."""
    form = rng.choices(list(WORDINGS), FREQUENCY)[0]
    if "*" in form:
        a, b, c = rng.randint(2, 30), rng.randint(2, 30), rng.randint(2, 60)
        c = min(c, a * b - 1)
    else:
        a, b, c = rng.randint(3, 99), rng.randint(2, 99), 0
        if "-" in form and a <= b:
            a, b = b + 1, a
    n, m = rng.sample(NAMES, 2)
    words = dict(a=a, b=b, c=c, n=n, m=m, i=rng.choice(ITEMS), x=rng.choice(BOXES), d=rng.randint(2, 99))
    sentences = rng.choice(WORDINGS[form]).format(**words)
    distractor = None
    if rng.random() < 0.4:
        distractor = int(words["d"])
        extra = rng.choice(DISTRACTORS).format(**words)
        story, dot, question = sentences.rpartition(". ")
        sentences = f"{extra} {sentences}" if rng.random() < 0.5 else f"{story}{dot}{extra} {question}"
    answer = a * b if "*" in form else a
    answer += {"+": 1, "-": -1}.get(form[-5], 0) * (c if "*" in form else b)
    return Problem(sentences, form.format(**words), answer, distractor)


def make_problems(count: int, seed: int, *, held_out: bool) -> list[Problem]:
    """Distinct problems; a tenth of all questions is held out."""
    rng = random.Random(seed)
    found: dict[str, Problem] = {}
    while len(found) < count:
        problem = make_problem(rng)
        if (zlib.crc32(problem.question.encode()) % 10 == 0) == held_out:
            found.setdefault(problem.question, problem)
    return list(found.values())


def main() -> None:
    """Write the training and the held-out problems."""
    folder = Path(__file__).parent / "data"
    folder.mkdir(exist_ok=True)
    for name, problems in {
        "train": make_problems(1600, seed=1, held_out=False),
        "test": make_problems(256, seed=2, held_out=True),
    }.items():
        rows = (json.dumps({"question": p.question, "answer": str(p.answer)}) for p in problems)
        (folder / f"{name}.jsonl").write_text("\n".join(rows) + "\n")


if __name__ == "__main__":
    main()
