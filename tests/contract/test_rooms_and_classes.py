"""Rules on folders and classes that a machine can see: a folder says what it is for, and a name means one class."""

import ast
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "zerotrain"
FILES = sorted(path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("folder", sorted({path.parent for path in FILES}), ids=str)
def test_a_folder_says_in_one_sentence_what_it_is_for(folder: Path):
    init = PACKAGE / folder / "__init__.py"
    assert not sentence_problem(init.read_text() if init.is_file() else "")


def test_a_folder_that_says_nothing_is_seen():
    assert sentence_problem('"""Checkpoints as files, such as a.pt: read and written.\n\nMore of it."""') is None
    assert sentence_problem("") == sentence_problem("import torch") == "there is no docstring"
    assert (
        sentence_problem('"""Files"""') == sentence_problem('"""Reads files. Writes them."""') == "is no one sentence"
    )


def test_a_name_stands_for_one_class():
    assert names_used_twice((PACKAGE / path).read_text() for path in FILES) == []


def test_a_name_of_two_classes_is_seen():
    assert names_used_twice(["class Place: pass\nclass Home: pass", "class Place: pass"]) == ["Place"]


def sentence_problem(text: str) -> str | None:
    """Why a module's docstring does not begin with one sentence; None if it does."""
    docstring = ast.get_docstring(ast.parse(text))
    if not docstring:
        return "there is no docstring"
    first = " ".join(docstring.partition("\n\n")[0].split())
    return None if re.fullmatch(r"[^.]*(\.(?! [A-Z])[^.]*)*\.", first) else "is no one sentence"


def names_used_twice(texts: Iterable[str]) -> list[str]:
    """Names of several classes in the texts of modules."""
    nodes = (node for text in texts for node in ast.walk(ast.parse(text)))
    counts = Counter(node.name for node in nodes if isinstance(node, ast.ClassDef))
    return [name for name, count in counts.items() if count > 1]
