"""Word problems with worked answers: reasoning-gym's `gsm_symbolic`, after GSM-Symbolic (arXiv 2410.05229)."""

import json
import math
import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import asdict, dataclass, fields
from importlib import resources
from pathlib import Path
from typing import Any

from specfold_jax.text.prompts import json_object, lines_of
from specfold_jax.values import conform

SUFFIX = " Give the result as your final answer. Do not include units."
HELD_OUT_SEED = 10**9
_NUMBER = re.compile(r"-?(?:\d[\d,]*)?\.?\d+")


@dataclass(frozen=True)
class Problem:
    """A question, its worked answer (ending in "#### 28080"), and the number that the worked answer arrives at."""

    question: str
    answer_text: str
    number: float

    def __post_init__(self) -> None:
        conform(self)


def final_number(text: str) -> float | None:
    """The number after the first "####" of `text`, or None if there is none. "#### $43,800" gives 43800.0."""
    _, mark, tail = text.partition("####")
    found = _NUMBER.search(tail.partition("\n")[0]) if mark else None
    return float(found.group().replace(",", "")) if found else None


def is_correct(text: str, problem: Problem) -> bool:
    """Whether `text` arrives at the worked answer's number. Numbers are compared, so "20" equals "20.0"."""
    number = final_number(text)
    return number is not None and math.isclose(number, problem.number, rel_tol=1e-9, abs_tol=1e-9)


def _draw(first: int, count: int) -> Iterator[Problem]:
    """The problems of seeds first .. first + count - 1. Problem i has the numbers of seed first + i. Its template follows from `first` and
    i."""
    try:
        import reasoning_gym  # takes over a second, and only training needs it
    except ImportError as error:
        raise ImportError("problems come from the package reasoning-gym; install it with: pip install reasoning-gym") from error
    dataset = reasoning_gym.create_dataset("gsm_symbolic", seed=first, size=count)
    for i in range(count):
        item: Any = dataset[i]
        answer = item["metadata"]["answer_cot"]
        number = final_number(answer)
        if number is None:
            raise ValueError(f"gsm_symbolic seed {first + i}: the worked answer {answer!r} must end in '#### number'")
        yield Problem(item["question"].removesuffix(SUFFIX), answer, number)


def generate(draws: int, seed: int = 0) -> list[Problem]:
    """The different questions among `draws` training problems, in order. Of 170 000 draws about 85 % differ, of more a smaller share.

    Raises ValueError if the seeds seed .. seed + draws - 1 reach the held-out ones (from 10**9 on).
    """
    if not 0 <= seed < seed + draws <= HELD_OUT_SEED:
        raise ValueError(f"{seed=} and {draws=} must keep the seeds inside [0, {HELD_OUT_SEED}): later ones are held out")
    return list(_unique(_draw(seed, draws), set()))


def held_out(count: int, exclude: Collection[str], seed: int = HELD_OUT_SEED) -> list[Problem]:
    """`count` different problems from the held-out seeds whose question is not in `exclude` (the training questions)."""
    if seed < HELD_OUT_SEED:
        raise ValueError(f"held-out {seed=} must be at least {HELD_OUT_SEED}: smaller ones are for training")
    found: list[Problem] = []
    seen, draws = set(exclude), max(4 * count, 100)
    while len(found) < count:
        before = len(found)
        found += _unique(_draw(seed, draws), seen)
        seed += draws
        if len(found) == before:
            raise ValueError(f"{draws} more draws gave no new problem: {count=} must be smaller (found {before})")
    return found[:count]


def _unique(problems: Iterable[Problem], seen: set[str]) -> Iterator[Problem]:
    for problem in problems:
        if problem.question not in seen:
            seen.add(problem.question)
            yield problem


def packaged_problems() -> list[Problem]:
    """The problems shipped beside the tiny model: 2000 whose questions it was not trained on."""
    return read_problems(Path(str(resources.files("specfold_jax"))) / "assets" / "tiny" / "held_out.jsonl")


def write_problems(path: Path, problems: Iterable[Problem]) -> None:
    """Writes a JSON object a line, with the fields of `Problem`. `read_prompts` reads the file too."""
    path.write_text("".join(json.dumps(asdict(p), ensure_ascii=False) + "\n" for p in problems), encoding="utf-8")


def read_problems(path: Path) -> list[Problem]:
    """Reads what `write_problems` wrote. Raises ValueError naming file and line."""
    problems = []
    for where, line in lines_of(path):
        record = json_object(where, line)
        if missing := [entry.name for entry in fields(Problem) if entry.name not in record]:
            raise ValueError(f'{where}: lacks {missing}; it must hold "question", "answer_text" and a "number"')
        try:
            problems.append(Problem(**{entry.name: record[entry.name] for entry in fields(Problem)}))
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error
    return problems
