"""Rules on folders and classes that a machine can see: a folder says what it is for, and a name stands for one class,
which is whole in one file.

A list of exceptions may only become shorter: an entry that breaks its rule no longer fails the test too.
"""

import ast
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "zerotrain"
FILES = sorted(path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py"))
SPLIT_CLASSES: set[str] = set()
"""Base classes that know what a subclass in another file sets."""


@pytest.mark.parametrize("folder", sorted({path.parent for path in FILES}), ids=str)
def test_a_folder_says_in_one_sentence_what_it_is_for(folder: Path):
    init = PACKAGE / folder / "__init__.py"
    assert not sentence_problem(init.read_text() if init.is_file() else "")


def test_a_name_stands_for_one_class():
    assert names_used_twice(all_classes()) == []


def test_no_class_is_split_over_files_by_inheritance():
    assert set(split_classes(all_classes())) == SPLIT_CLASSES


@pytest.mark.parametrize(
    ("base", "known"),
    [
        ("class Base:\n scale: int\n def grow(self): pass", ["scale"]),
        ("class Base:\n def grow(self): return self.scale * self.size()", ["scale", "size"]),
        ("class Base:\n scale = 1\n def size(self): raise NotImplementedError\n def grow(self): self.scale", []),
        ("class Base:\n def __init__(self): self.scale, self.x = 1, 2\n def grow(self): return self.scale", []),
        ("@dataclass(frozen=True)\nclass Base:\n scale: int", []),
        ("class Base(ABC):\n scale: int\n def grow(self): return self.scale", []),
        ("class Base(nn.Module):\n def grow(self): return self.training", []),
    ],
)
def test_a_class_that_is_split_over_files_is_seen(base: str, known: list[str]):
    whole = "class Whole(Base):\n def __init__(self): self.scale: int = 2\n def size(self): return 3"
    between = classes_in("between.py", "class Between(Base): pass")
    found = split_classes(classes_in("base.py", base) + between + classes_in("whole.py", whole))
    assert found == ({"Base": known} if known else {})
    assert split_classes(classes_in("one.py", f"{base}\n{whole}")) == {}
    further = classes_in("whole.py", whole.replace("(Base)", "(parts.Between)"))
    assert split_classes(classes_in("base.py", base) + between + further) == ({"Base": known} if known else {})


@dataclass(frozen=True)
class DefinedClass:
    """A class as its file defines it."""

    path: str
    node: ast.ClassDef

    @property
    def bases(self) -> list[str]:
        return [called(base.value if isinstance(base, ast.Subscript) else base) or "" for base in self.node.bases]

    @property
    def declared(self) -> set[str]:
        """Attributes that are annotated, and get no value there."""
        plain = [each for each in self.node.body if isinstance(each, ast.AnnAssign) and each.value is None]
        return {each.target.id for each in plain if isinstance(each.target, ast.Name)}

    @property
    def given(self) -> set[str]:
        """Attributes that have a value by this class, its methods among them."""
        bodies = [each.targets for each in self.node.body if isinstance(each, ast.Assign)]
        bodies += [[each.target] for each in self.node.body if isinstance(each, ast.AnnAssign) and each.value]
        names = {name.id for targets in bodies for each in targets for name in ast.walk(each) if is_name(name)}
        methods = {each.name for each in self.node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)}
        is_dataclass = any("dataclass" in ast.unparse(each) for each in self.node.decorator_list)
        is_filled = is_dataclass or {"NamedTuple", "Protocol"} & {*self.bases}
        return names | methods | self._of_self(ast.Store) | (self.declared if is_filled else set())

    @property
    def read(self) -> set[str]:
        return self._of_self(ast.Load)

    def _of_self(self, context: type) -> set[str]:
        found = (node for node in ast.walk(self.node) if isinstance(node, ast.Attribute))
        own = (node for node in found if is_name(node.value) and node.value.id == "self")
        return {node.attr for node in own if isinstance(node.ctx, context)}


def is_name(node: ast.AST) -> bool:
    return isinstance(node, ast.Name)


def all_classes() -> list[DefinedClass]:
    return [each for path in FILES for each in classes_in(str(path), (PACKAGE / path).read_text())]


def classes_in(path: str, text: str) -> list[DefinedClass]:
    return [DefinedClass(path, node) for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ClassDef)]


def sentence_problem(text: str) -> str | None:
    """Why a module's docstring does not begin with one sentence; None if it does."""
    docstring = ast.get_docstring(ast.parse(text))
    if not docstring:
        return "there is no docstring"
    first = " ".join(docstring.partition("\n\n")[0].split())
    return None if re.fullmatch(r"[^.]*(\.(?! [A-Z])[^.]*)*\.", first) else "is no one sentence"


def names_used_twice(classes: list[DefinedClass]) -> list[str]:
    counts = Counter(each.node.name for each in classes)
    return [name for name, count in counts.items() if count > 1]


def split_classes(classes: list[DefinedClass]) -> dict[str, list[str]]:
    """Base class -> the attributes that it declares or reads, and that only a subclass in another file gives.

    An abstract class is an interface, whose subclasses give what it declares.
    """
    by_name = {each.node.name: each for each in classes}

    def above(each: DefinedClass) -> list[DefinedClass]:
        bases = [by_name[base] for base in each.bases if base in by_name and by_name[base] is not each]
        return [found for base in bases for found in (base, *above(base))]

    split: dict[str, set[str]] = {}
    for sub in classes:
        for base in (each for each in above(sub) if each.path != sub.path):
            if "ABC" in {*base.bases}.union(*(each.bases for each in above(base))):
                continue
            own = base.given.union(*(each.given for each in above(base)))
            if known := (base.declared | base.read) & sub.given - own:
                split.setdefault(base.node.name, set()).update(known)
    return {name: sorted(known) for name, known in split.items()}


def called(node: ast.expr) -> str | None:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else None
