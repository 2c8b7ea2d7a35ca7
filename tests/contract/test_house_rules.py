"""Rules on the code that a machine can see: short files and functions, a stage that is a row of data, and no code that
comes over the network."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "zerotrain"
FILES = sorted(path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py"))
BLIND_TO_THE_STAGE = ("comm", "sharding", "engine", "training")
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
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
