"""Documents name what there is: links, files, modules, commands, flags, options, statistics and rooms."""

import argparse
import ast
import importlib
import io
import re
import shlex
import tokenize
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from absl import flags

import specfold_jax as sf
from benchmarks.common.environment import PACKAGES, RESULTS, ROOT
from benchmarks.tables.write import DOCUMENTS as WITH_TABLES
from specfold_jax.cli import COMMANDS

FOLDERS = (*PACKAGES, "benchmarks", "parity_tests")
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.md"))])
SOURCES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
README = ROOT / "README.md"
OPTIONS = ROOT / "specfold_jax" / "README.md"

_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
_FILE = re.compile(r"(?<![\w/.<-])((?:[\w.-]+/)*[\w-]+\.(?:py|md))(?![\w/])")
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_MODULE = re.compile(r"-m ((?:benchmarks|parity_tests)\.[\w.]+)")
_DOTTED = re.compile(rf"`((?:{'|'.join(FOLDERS)})(?:\.\w+)+)")
_SECTION = re.compile(r'([\w/]+/README\.md), "([^"]+)"')


@cache
def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def prose_of(path: Path) -> str:
    """A document, or the docstrings, other bare strings and comments of a Python file."""
    if path.suffix == ".md":
        return text_of(path)
    tree = ast.parse(text_of(path))
    strings = [node.value.value for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)]
    comments = [t.string for t in tokenize.generate_tokens(io.StringIO(text_of(path)).readline) if t.type == tokenize.COMMENT]
    return "\n".join([*(s for s in strings if isinstance(s, str)), *comments])


def anchors(path: Path) -> set[str]:
    """What a link to a heading of the document may end in."""
    headings = re.findall(r"^#+ (.+)$", _FENCE.sub("", text_of(path)), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def section(path: Path, heading: str) -> str:
    """From a heading to the next one of its level or above."""
    level, _, after = re.split(rf"^(#+) ({re.escape(heading)})$", text_of(path), maxsplit=1, flags=re.MULTILINE)[1:]
    return re.split(rf"^#{{1,{len(level)}}} ", after, maxsplit=1, flags=re.MULTILINE)[0]


def first_column(table: str, cell: int = 0) -> set[str]:
    """Names in backticks in one column of the tables of a text."""
    rows = [line.split("|")[1:-1] for line in table.splitlines() if line.startswith("| ")]
    return {name for row in rows for name in re.findall(r"`(\w+)`", row[cell])}


@cache
def commands() -> list[tuple[str, list[str]]]:
    """Command lines of the documents' code blocks, and of docstrings and examples in code, with the file they stand in.

    Continued lines are joined and comments left out; so is what stands two spaces behind a command in a docstring, its explanation.
    """
    found = []
    for path in (*DOCUMENTS, *SOURCES):
        document = path.suffix == ".md"
        blocks = [body for kind, body in _FENCE.findall(text_of(path)) if kind == "sh"] if document else examples_of(path)
        for line in "\n".join(blocks).replace("\\\n", "").splitlines():
            line = line.split("#")[0] if document else re.split(r"(?<=\S)  +(?!-)", line)[0]
            if match := re.search(r"(?:^|[ /])(specfold [a-z].*|python -m (?:benchmarks|parity_tests)\..*)", line):
                found.append((name_of(path), shlex.split(match[1])))
    return found


def examples_of(path: Path) -> list[str]:
    """Lines of a Python file's strings that begin with a command; not of tests, whose strings are what commands print."""
    if path.name.startswith("test_"):
        return []
    nodes = ast.walk(ast.parse(text_of(path)))
    strings = "\n".join(node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str))
    return re.findall(r"^ *(?:specfold [a-z]|python -m )(?:.*\\\n)*.*$", strings, re.MULTILINE)


def options_of(words: list[str]) -> list[str]:
    return [word.partition("=")[0] for word in words if word.startswith("--")]


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_links_lead_somewhere(path: Path):
    for target in _LINK.findall(_FENCE.sub("", text_of(path))):
        if target.startswith("https://"):
            continue
        file, _, anchor = target.partition("#")
        there = (path.parent / file).resolve() if file else path
        assert there.exists(), target
        assert there.is_relative_to(ROOT), target
        if anchor:
            assert anchor in anchors(there), target


@pytest.mark.parametrize("path", [*DOCUMENTS, *SOURCES], ids=name_of)
def test_files_that_are_named_exist(path: Path):
    """With folders: from the top, or from a folder that the file is in. Bare names: anywhere in the same package."""
    package = path.relative_to(ROOT).parts[0]
    inside = [ROOT / folder for folder in FOLDERS if package in (folder, path.name)]  # the top README is of all packages
    bases = [parent for parent in path.parents if parent.is_relative_to(ROOT)]
    if package == "specfold_torch_ref":  # it names the files that it mirrors
        bases.append(ROOT / "specfold_jax")
    for name in _FILE.findall(prose_of(path)):
        assert any((base / name).exists() for base in bases) or ("/" not in name and any(any(p.rglob(name)) for p in inside)), name


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_dotted_names_in_docstrings_exist(path: Path):
    for dotted in _DOTTED.findall(prose_of(path)):
        parts = dotted.split(".")
        count = max(
            n
            for n in range(1, len(parts) + 1)
            if ROOT.joinpath(*parts[:n]).is_dir() or ROOT.joinpath(*parts[:n]).with_suffix(".py").exists()
        )
        rest = parts[count:]
        file = ROOT.joinpath(*parts[:count]).with_suffix(".py")
        file = file if file.exists() else ROOT.joinpath(*parts[:count], "__init__.py")
        assert not rest or re.search(rf"\b{rest[0]}\b", text_of(file)), dotted


def test_sections_that_code_points_at_exist():
    found = [(path, *match) for path in SOURCES for match in _SECTION.findall(prose_of(path))]
    for path, document, heading in found:
        assert heading.lower().replace(" ", "-") in anchors(ROOT / document), (name_of(path), document, heading)
    assert {document for _, document, _ in found} >= {"specfold_jax/diffusion/README.md", "kernels_pallas/README.md"}


def test_the_readme_is_short_and_holds_the_two_commands_that_ci_runs():
    lines = text_of(README).splitlines()
    assert len(lines) <= 170
    begun = [line for line in lines if line.startswith("python3 -m venv")]
    assert begun == [
        "python3 -m venv .venv && .venv/bin/pip install -q . && .venv/bin/specfold generate --compare",
        "python3 -m venv .venv && .venv/bin/pip install -q -e '.[dev]' && .venv/bin/pytest -n auto --maxprocesses 8",
    ]


def test_the_readme_has_a_line_for_every_room():
    shown = section(README, "Where things are")
    for folder in FOLDERS:
        assert f"\n{folder}/ " in shown
        inside = shown.partition(f"\n{folder}/ ")[2]
        inside = re.split(r"\n\w", inside, maxsplit=1)[0]
        for room in (path.parent for path in (ROOT / folder).glob("*/__init__.py")):
            same_as = "the rooms above" in inside and (ROOT / "specfold_jax" / room.name).is_dir()
            assert same_as or f"{room.name}/" in inside, name_of(room)


@pytest.mark.parametrize("config", [sf.DecodeConfig, sf.FoldConfig, sf.DraftGraph], ids=lambda config: config.__name__)
def test_every_option_has_its_line_and_no_other_has(config: Any):
    fields = set(config.__dataclass_fields__)
    assert first_column(section(OPTIONS, config.__name__)) == fields


def test_every_statistic_has_its_line_and_no_other_has():
    assert first_column(section(OPTIONS, "Statistics")) == set(sf.Stats.__dataclass_fields__)


def test_public_names_that_documents_use_exist():
    for path in DOCUMENTS:
        for name in re.findall(r"\bsf\.(\w+)", text_of(path)):
            assert hasattr(sf, name), (name_of(path), name)


def test_python_in_documents_compiles():
    for path in DOCUMENTS:
        for kind, body in _FENCE.findall(text_of(path)):
            if kind == "python":
                compile(body, name_of(path), "exec")


@cache
def flags_of_command(name: str) -> set[str]:
    parser = argparse.ArgumentParser()
    importlib.import_module(f"specfold_jax.cli.{name}").add_flags(parser)
    return set(parser._option_string_actions) | {"--help"}


def flags_of_module(name: str) -> set[str]:
    module: Any = importlib.import_module(name)
    if hasattr(module, "FLAGS"):
        own = module.FLAGS
    else:
        own = flags.FlagValues()
        module.define_flags(own)
    return {f"--{flag}" for flag in own} | {f"--no{flag}" for flag in own} | {"--help"}


def test_commands_in_documents_and_docstrings_exist_with_their_flags():
    seen = set()
    for where, (program, *words) in commands():
        if program == "specfold":
            seen.add(words[0])
            assert words[0] in COMMANDS, (where, words)
            assert set(options_of(words)) <= flags_of_command(words[0]), (where, words)
        else:
            assert set(options_of(words)) <= flags_of_module(words[1]), (where, words)
    assert seen == set(COMMANDS)
    for path in DOCUMENTS:
        for name in re.findall(r"`specfold ([a-z]+)", text_of(path)):
            assert name in COMMANDS, (name_of(path), name)


def test_modules_that_are_run_are_there():
    found = {name for path in (*DOCUMENTS, *SOURCES) for name in _MODULE.findall(prose_of(path))}
    assert found
    for name in found:
        path = ROOT.joinpath(*name.split(".")).with_suffix(".py")
        assert path.exists(), name
        assert '__name__ == "__main__"' in text_of(path), name


def test_every_document_with_tables_is_written():
    marked = {path for path in DOCUMENTS if "<!-- table:" in text_of(path)}
    assert marked == set(WITH_TABLES)
    assert RESULTS / "README.md" in marked
