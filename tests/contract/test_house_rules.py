"""Rules on the code that a machine can see: small folders, files, classes and functions, a name that stands for one
class, a stage that is a row of data, kinds of devices told apart in one place, one lock, one way to replace a
file, and no code that comes over the network.

A list of exceptions may only become shorter: an entry that breaks its rule no longer fails the test too.
"""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "zerotrain"
FILES = sorted(path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py"))
BLIND_TO_THE_STAGE = ("comm", "sharding", "engine", "training")
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_FOLDER_FILES = 12
MAX_CLASS_METHODS = 20
LARGE_CLASSES = {"BucketGradient", "BucketUpdate"}
SPLIT_CLASSES: set[str] = set()
"""Base classes that know what a subclass in another file sets."""
IN_ONE_PLACE = {
    "fcntl.flock": ["files/lock.py"],
    "fcntl.lockf": [],
    "os.replace": ["files/whole.py"],
    "os.rename": [],
    "shutil.move": [],
    ".replace": [],
    ".rename": [  # whole folders, each after what its own promise asks for
        "checkpoint/folder.py",  # a save appears once its names are on the disk
        "checkpoint/kept.py",  # one that is to be removed, or to be set aside, loses its name first
        "commands/export/destination.py",  # an export that is replaced, which comes back after an error
    ],
}
"""Calls, of a module's function or of a path's method, and the files that alone have them."""
UNPICKLING = (
    "pickle.load",
    "pickle.loads",
    "pickle.Unpickler",
    "dist.all_gather_object",
    "dist.gather_object",
    "dist.broadcast_object_list",
    "dist.scatter_object_list",
    "dist.recv_object_list",
)


@pytest.mark.parametrize("path", FILES, ids=str)
def test_a_file_and_its_functions_are_short(path: Path):
    text = (PACKAGE / path).read_text()
    assert len(text.splitlines()) < MAX_FILE_LINES
    functions = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)]
    assert [node.name for node in functions if node.end_lineno - node.lineno >= MAX_FUNCTION_LINES] == []


def test_a_folder_has_few_files():
    assert large_folders(FILES) == []


def test_a_large_folder_is_seen():
    paths = [Path("comm", f"{number}.py") for number in range(MAX_FOLDER_FILES)]
    assert large_folders([*paths, Path("comm/__init__.py"), Path("comm/wires/tcp.py")]) == []
    assert large_folders([*paths, Path("comm/one_more.py")]) == ["comm has 13"]


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


def test_a_class_has_few_methods():
    assert large_classes(all_classes()) == LARGE_CLASSES


def test_a_large_class_is_seen():
    methods = [f" def method{number}(self): pass" for number in range(MAX_CLASS_METHODS)]
    assert large_classes(classes_in("a.py", "\n".join(["class Small:", *methods]))) == set()
    assert large_classes(classes_in("a.py", "\n".join(["class Large:", *methods, " async def more(self): pass"]))) == {
        "Large"
    }


def test_a_name_stands_for_one_class():
    assert names_used_twice(all_classes()) == []


def test_a_name_of_two_classes_is_seen():
    both = classes_in("a.py", "class Place: pass\nclass Home: pass") + classes_in("b.py", "class Place: pass")
    assert names_used_twice(both) == ["Place"]


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


@pytest.mark.parametrize("path", [path for path in FILES if path.parts[0] in BLIND_TO_THE_STAGE], ids=str)
def test_no_code_compares_the_stage_number(path: Path):
    assert list(stage_comparisons((PACKAGE / path).read_text())) == []


def test_a_comparison_of_the_stage_number_is_seen():
    texts = [
        "if stage == 3: pass",
        "x = plan.stage in (0, 1)",
        "while zero.stage > 1: pass",
        "match stage:\n case 3: 0",
    ]
    assert [len(list(stage_comparisons(text))) for text in texts] == [1, 1, 1, 1]
    assert list(stage_comparisons("plan = STAGES[stage]; sharded = plan.shards_gradients")) == []


@pytest.mark.parametrize("path", [path for path in FILES if path.parts[0] != "testing"], ids=str)
def test_nothing_is_unpickled(path: Path):
    """But in tests, what their own processes answer."""
    assert list(unpickling((PACKAGE / path).read_text())) == []


def test_unpickling_is_seen():
    text = "pickle.loads(x); torch.load(f); torch.load(f, weights_only=False); dist.all_gather_object(out, x)"
    assert len(list(unpickling(text))) == 4
    assert list(unpickling("torch.load(f, weights_only=True); json.loads(x); self.gather_objects(x)")) == []
    assert list(unpickling("class Any_(pickle.Unpickler):\n x = 1")) == ["Any_"]
    assert list(unpickling("class Any_(pickle._Unpickler):\n x = 1")) == ["Any_"]
    assert list(unpickling("class Few(pickle.Unpickler):\n def find_class(self, module, name): return dict")) == []


@pytest.mark.parametrize("path", [path for path in FILES if path.parts[0] != "device"], ids=str)
def test_no_code_asks_for_the_kind_of_a_device(path: Path):
    """But in device/, whose `Device` answers what the others want to know."""
    assert list(kinds_asked_for((PACKAGE / path).read_text())) == []


def test_a_question_for_the_kind_of_a_device_is_seen():
    texts = [
        "if tensor.is_cuda: pass",
        "ask = not self.shard.is_cpu",
        "if world.device.type != wanted: pass",
        "chosen.type == 'cuda'",
        "match device.type:\n case 'cpu': 0",
        "torch.cuda.synchronize()",
        "stream: torch.cuda.Stream",
        "import torch.cuda",
        "from torch import cuda",
        "from torch.cuda import Event",
    ]
    assert [len(list(kinds_asked_for(text))) for text in texts] == [1] * len(texts)
    plain = "torch.backends.cuda.matmul.allow_tf32 = False; tensor.type(); item.type == IO; device_of(device).is_host"
    assert list(kinds_asked_for(plain)) == []


def kinds_asked_for(text: str) -> Iterator[str]:
    """Every place that tells a CPU from a GPU, or calls one of them by name."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Attribute):
            of_device = node.attr == "type" and called(node.value) in ("device", "_device")
            if of_device or node.attr in ("is_cpu", "is_cuda") or ast.unparse(node) == "torch.cuda":
                yield ast.unparse(node)
        elif isinstance(node, ast.Compare) and called(node.left) == "type":
            named = any(isinstance(each, ast.Constant) and each.value in ("cpu", "cuda") for each in node.comparators)
            if named and called(node.left.value) not in ("device", "_device"):
                yield ast.unparse(node)
        elif isinstance(node, ast.Import):
            yield from (each.name for each in node.names if each.name.startswith("torch.cuda"))
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names = (f"{node.module}.{each.name}" for each in node.names)
            yield from (name for name in names if name.startswith("torch.cuda"))


@dataclass(frozen=True)
class DefinedClass:
    """A class as its file defines it."""

    path: str
    node: ast.ClassDef

    @property
    def bases(self) -> list[str]:
        return [called(base.value if isinstance(base, ast.Subscript) else base) or "" for base in self.node.bases]

    @property
    def methods(self) -> list[str]:
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
        return [each.name for each in self.node.body if isinstance(each, kinds)]

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
        is_dataclass = any("dataclass" in ast.unparse(each) for each in self.node.decorator_list)
        is_filled = is_dataclass or {"NamedTuple", "Protocol"} & {*self.bases}
        return names | {*self.methods} | self._of_self(ast.Store) | (self.declared if is_filled else set())

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


def large_folders(paths: list[Path]) -> list[str]:
    counts = Counter(str(path.parent) for path in paths if path.name != "__init__.py")
    return [f"{folder} has {count}" for folder, count in counts.items() if count > MAX_FOLDER_FILES]


def sentence_problem(text: str) -> str | None:
    """Why a module's docstring does not begin with one sentence; None if it does."""
    docstring = ast.get_docstring(ast.parse(text))
    if not docstring:
        return "there is no docstring"
    first = " ".join(docstring.partition("\n\n")[0].split())
    return None if re.fullmatch(r"[^.]*(\.(?! [A-Z])[^.]*)*\.", first) else "is no one sentence"


def large_classes(classes: list[DefinedClass]) -> set[str]:
    return {each.node.name for each in classes if len(each.methods) > MAX_CLASS_METHODS}


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


@pytest.mark.parametrize("call", IN_ONE_PLACE)
def test_a_lock_is_taken_and_a_file_replaced_in_one_place(call: str):
    found = [str(path) for path in FILES if path.parts[0] != "testing" and calls_of((PACKAGE / path).read_text(), call)]
    assert found == IN_ONE_PLACE[call]


def test_a_second_lock_and_a_second_rename_are_seen():
    text = "fcntl.flock(file, 2); os.replace(a, b); path.with_name(x).rename(b); path.rename(b); Path(a).replace(b)"
    text += "; from fcntl import lockf; from os import path, rename as put; shutil.move(a, b)"
    found = {call: calls_of(text, call) for call in IN_ONE_PLACE}
    assert found == dict.fromkeys(IN_ONE_PLACE, 1) | {".rename": 2}
    harmless = "text.replace('a', 'b'); replace(x, y=1); dataclasses.replace(x, y=1); import os; os.path.join(a)"
    assert [calls_of(harmless, call) for call in IN_ONE_PLACE] == [0] * len(IN_ONE_PLACE)


def calls_of(text: str, call: str) -> int:
    """How often a text calls a function of a module, or imports it by its own name; of ".name" how often it calls a
    method with one argument."""
    module, _, name = call.rpartition(".")
    found = 0
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and node.module == module:
            found += name in [each.name for each in node.names]
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == name:
            is_method = not module and len(node.args) == 1 and not node.keywords
            found += ast.unparse(node.func.value) == module or is_method
    return found


def unpickling(text: str) -> Iterator[str]:
    """Every call that makes any object of bytes, and every unpickler that does not decide itself what it makes."""
    for node in (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ClassDef)):
        decides = any(isinstance(each, ast.FunctionDef) and each.name == "find_class" for each in node.body)
        if {"pickle.Unpickler", "pickle._Unpickler"} & {*map(ast.unparse, node.bases)} and not decides:
            yield node.name
    for node in (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)):
        name, is_safe = ast.unparse(node.func), "weights_only=True" in map(ast.unparse, node.keywords)
        if name.replace("torch.distributed.", "dist.") in UNPICKLING:
            yield name
        if name == "torch.load" and not is_safe:
            yield name


def stage_comparisons(text: str) -> Iterator[str]:
    """Every comparison or match that has something called stage in it."""
    for node in ast.walk(ast.parse(text)):
        compared = [node.subject] if isinstance(node, ast.Match) else []
        compared += [node.left, *node.comparators] if isinstance(node, ast.Compare) else []
        if any(called(part) == "stage" for part in compared):
            yield ast.unparse(node)


def called(node: ast.expr) -> str | None:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else None
