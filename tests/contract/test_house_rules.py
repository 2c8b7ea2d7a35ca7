"""Rules on the code that a machine can see: a stage that is a row of data, kinds of devices told apart in one place,
one lock and one way to replace a file, and no code that comes over the network."""

import ast
import functools
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "zerotrain"
FILES = sorted(path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py"))
BLIND_TO_THE_STAGE = ("comm", "sharding", "engine", "training")
IN_ONE_PLACE = {
    "fcntl.flock": ["files/lock.py"],
    "fcntl.lockf": [],
    "os.replace": ["files/lock.py"],
    "os.rename": [],
    "shutil.move": [],
    ".replace": [],
    ".rename": [  # whole folders, each after what its own promise asks for
        # A save appears once its names are on the disk; one to remove or to set aside loses its name first.
        "checkpoint/folder.py",
        "commands/export_folder.py",  # an export that is replaced, which comes back after an error
        "training/callbacks/loggers.py",  # an earlier sitting's curves, all of which the next one writes again
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


def found_in(folders: Callable[[str], bool], look: Callable[[str], Iterable[Any]]) -> dict[str, list[Any]]:
    """What is found in the files of these folders, by file."""
    found = {str(path): list(look((PACKAGE / path).read_text())) for path in FILES if folders(path.parts[0])}
    assert len(found) > 10
    return {path: each for path, each in found.items() if each}


def test_no_code_compares_the_stage_number():
    assert found_in(lambda folder: folder in BLIND_TO_THE_STAGE, stage_comparisons) == {}


def test_nothing_is_unpickled():
    assert found_in(lambda folder: True, unpickling) == {}


def test_what_the_rules_forbid_is_seen():
    assert len(list(stage_comparisons("x = plan.stage in (0, 1)\nmatch stage:\n case 3: 0"))) == 2
    assert len(list(kinds_asked_for("tensor.is_cuda; chosen.type == 'cuda'; torch.cuda.synchronize()"))) == 3
    text = "pickle.loads(x); torch.load(f); torch.load(f, weights_only=False); dist.all_gather_object(out, x)"
    assert len(list(unpickling(text))) == 4
    assert list(unpickling("torch.load(f, weights_only=True); json.loads(x); self.gather_objects(x)")) == []
    assert list(unpickling("class Any_(pickle.Unpickler):\n x = 1")) == ["Any_"]
    assert list(unpickling("class Any_(pickle._Unpickler):\n x = 1")) == ["Any_"]
    assert list(unpickling("class Few(pickle.Unpickler):\n def find_class(self, module, name): return dict")) == []


def test_no_code_asks_for_the_kind_of_a_device():
    """But in device/, whose `Device` answers what the others want to know."""
    assert found_in(lambda folder: folder != "device", kinds_asked_for) == {}


def kinds_asked_for(text: str) -> Iterator[str]:
    """Every place that tells a CPU from a GPU, or calls one of them by name."""
    for node in ast.walk(parsed(text)):
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


@pytest.mark.parametrize("call", IN_ONE_PLACE)
def test_a_lock_is_taken_and_a_file_replaced_in_one_place(call: str):
    found = [str(path) for path in FILES if calls_of((PACKAGE / path).read_text(), call)]
    assert found == IN_ONE_PLACE[call]


@functools.cache
def parsed(text: str) -> ast.Module:
    return ast.parse(text)


def calls_of(text: str, call: str) -> int:
    """How often a text calls a function of a module, or imports it by its own name; of ".name" how often it calls a
    method with one argument."""
    module, _, name = call.rpartition(".")
    found = 0
    for node in ast.walk(parsed(text)):
        if isinstance(node, ast.ImportFrom) and node.module == module:
            found += name in [each.name for each in node.names]
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == name:
            is_method = not module and len(node.args) == 1 and not node.keywords
            found += ast.unparse(node.func.value) == module or is_method
    return found


def unpickling(text: str) -> Iterator[str]:
    """Every call that makes any object of bytes, and every unpickler that does not decide itself what it makes."""
    for node in (node for node in ast.walk(parsed(text)) if isinstance(node, ast.ClassDef)):
        decides = any(isinstance(each, ast.FunctionDef) and each.name == "find_class" for each in node.body)
        if {"pickle.Unpickler", "pickle._Unpickler"} & {*map(ast.unparse, node.bases)} and not decides:
            yield node.name
    for node in (node for node in ast.walk(parsed(text)) if isinstance(node, ast.Call)):
        name, is_safe = ast.unparse(node.func), "weights_only=True" in map(ast.unparse, node.keywords)
        if name.replace("torch.distributed.", "dist.") in UNPICKLING:
            yield name
        if name == "torch.load" and not is_safe:
            yield name


def stage_comparisons(text: str) -> Iterator[str]:
    """Every comparison or match that has something called stage in it."""
    for node in ast.walk(parsed(text)):
        compared = [node.subject] if isinstance(node, ast.Match) else []
        compared += [node.left, *node.comparators] if isinstance(node, ast.Compare) else []
        if any(called(part) == "stage" for part in compared):
            yield ast.unparse(node)


def called(node: ast.expr) -> str | None:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else None
