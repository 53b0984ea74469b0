"""Problems, prompt files and the tokenizer."""

import json
from pathlib import Path

import pytest

from specfold_jax.text import problems as data
from specfold_jax.text import prompts
from specfold_jax.text.tokens import load_tokenizer
from specfold_jax.training.tokenizer import ANSWER, END, MASK, PAD, encode_plain, train_tokenizer


@pytest.fixture(scope="module")
def problems() -> list[data.Problem]:
    return data.generate(300)


@pytest.fixture(scope="module")
def tokenizer(problems, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer((t for p in problems for t in (p.question, p.answer_text)), 600).save_pretrained(folder, save_jinja_files=False)
    return load_tokenizer(folder)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("So 6 * 2 = 12\n#### 43800", 43800),
        ("#### 20.0", 20),
        ("#### $1,234.50 in all", 1234.5),
        ("####-3", -3),
        ("####  .5", 0.5),
        ("#### 12\n#### 13", 12),
        ("it is 43800", None),
        ("####\n12", None),
        ("#### none", None),
    ],
)
def test_final_number(text, number):
    assert data.final_number(text) == number


def test_is_correct_compares_numbers():
    problem = data.Problem("?", "#### 20", 20.0)
    assert data.is_correct("so\n#### 20.0", problem)
    assert not data.is_correct("#### 21", problem)
    assert not data.is_correct("20", problem)


def test_problems_are_deterministic_clean_and_different(problems):
    assert problems == data.generate(300)
    assert problems[:100] == data.generate(150)[:100], "more draws keep the first ones"
    assert problems != data.generate(300, seed=1)
    assert len({p.question for p in problems}) == len(problems)
    assert not any("Give the result" in p.question for p in problems)
    assert all(data.is_correct(p.answer_text, p) for p in problems)


def test_held_out_is_disjoint(problems):
    plain = data.held_out(50, [])
    some = {p.question for p in plain[::2]}
    again = data.held_out(50, some | {p.question for p in problems})
    assert len(again) == 50
    assert not {p.question for p in again} & (some | {p.question for p in problems})
    with pytest.raises(ValueError, match="seed"):
        data.held_out(1, [], seed=3)
    with pytest.raises(ValueError, match="held out"):
        data.generate(2, seed=data.HELD_OUT_SEED - 1)


def test_problems_round_trip(problems, tmp_path):
    path = tmp_path / "held_out.jsonl"
    data.write_problems(path, problems[:20])
    assert data.read_problems(path) == problems[:20]
    assert prompts.read_prompts(path) == [p.question for p in problems[:20]]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"answer_text": "absent"}, r"lacks \['answer_text'\]; it must hold"),
        *(
            ({"number": value}, "number=.* must be a finite number")
            for value in ("1", None, True, [1], 10**400, float("nan"), float("inf"))
        ),
        *(({"question": value}, "question=.* must be Unicode text") for value in (3, None, ["a"], "\ud800")),
    ],
)
def test_problem_file_errors(tmp_path, changes, message):
    record = {"question": "a", "answer_text": "#### 1", "number": 1} | changes
    (tmp_path / "a.jsonl").write_text(json.dumps({key: value for key, value in record.items() if value != "absent"}))
    with pytest.raises(ValueError, match=rf"a\.jsonl:1: {message}"):
        data.read_problems(tmp_path / "a.jsonl")


def test_prompts(tmp_path):
    text, lines = tmp_path / "a.txt", tmp_path / "b.jsonl"
    text.write_text("first\r\n\nsecond \n")
    assert prompts.read_prompts(text) == ["first", "second "]
    lines.write_text("\n".join(json.dumps(r) for r in ({"prompt": "p"}, {"question": "q"}, {"turns": ["t", "u"], "category": "math"})))
    assert prompts.read_prompts(lines) == ["p", "q", "t"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"prompt": "p"}\n{"prompt": \n', r"a\.jsonl:2: must be one JSON object"),
        ("a.jsonl", b'{"prompt": "p"}\n\n["p"]\n', r"a\.jsonl:3: must be a JSON object .* got list"),
        ("a.jsonl", b'{"text": "p"}\n', r'a\.jsonl:1: must have .*"prompt" .*text'),
        ("a.jsonl", b'{"turns": []}\n', r"a\.jsonl:1: must have"),
        ("a.jsonl", b'{"prompt": 3}\n', r"a\.jsonl:1: must have"),
        ("a.jsonl", b'{"prompt": "p"}\n{"prompt": "a \\ud800"}\n', r"a\.jsonl:2: prompt=.* must be Unicode text"),
        ("a.jsonl", b'{"prompt": ' + b"[" * 100_000, r"a\.jsonl:1: must be one JSON object"),
        ("a.jsonl", b'{"prompt": "p", "n": ' + b"9" * 5000 + b"}", r"a\.jsonl:1: must be one JSON object"),
        ("a.txt", b"good\nbad \xff\n", r"a\.txt:2: must be UTF-8"),
        ("a.txt", b" \n\n", r"a\.txt: is empty"),
        ("a.jsonl", b"", r"a\.jsonl: is empty"),
        ("a.csv", b"p\n", r"a\.csv: a prompts file must be named"),
    ],
)
def test_prompt_file_errors(tmp_path: Path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        prompts.read_prompts(tmp_path / name)


def test_tokenizer(tokenizer, problems):
    assert [tokenizer.convert_tokens_to_ids(t) for t in (PAD, ANSWER, END, MASK)] == [0, 1, 2, 3]
    assert len(tokenizer) == 600
    texts = [t for p in problems for t in (p.question, p.answer_text)] + ["€ 1,050 ÷ 3\n\t naïve 日本 \x00  ", "", " 007"]
    for text, ids in zip(texts, encode_plain(tokenizer, texts), strict=True):
        assert tokenizer.decode(ids) == text
    for i in range(len(tokenizer)):
        digits = sum(c.isdigit() for c in tokenizer.decode([i]))
        assert digits == 0 or len(tokenizer.decode([i])) == 1, "a digit is a token of its own"


def test_chat_template(tokenizer):
    question = "How many are 12 and 30?"
    message = [{"role": "user", "content": question}]
    ids = tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=True, return_dict=False)
    assert ids == [*encode_plain(tokenizer, [question])[0], 1]
    turns = [{"role": "user", "content": question}, {"role": "assistant", "content": "#### 42"}]
    assert tokenizer.apply_chat_template(turns, tokenize=False) == f"{question}{ANSWER}#### 42{END}"


def test_tokenizer_errors(tmp_path):
    with pytest.raises(ValueError, match="260"):
        train_tokenizer(["text"], 100)
    with pytest.raises(ValueError, match="more text"):
        train_tokenizer(["text"], 400)
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path)
