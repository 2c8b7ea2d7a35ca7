"""No callable is given to an object that is made already: no import shows such an arrow, and it points upwards.

Pass it to the constructor. The few that are listed came with a reason; a new one is found by its form, as well as that
can be seen in the text: `other.attribute = callable`, and a method that keeps a callable it is given.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "zerotrain"
LISTED = {
    "comm/whereabouts.py: Whereabouts.ask keeps describe": (
        "a world is there before its engine, and its errors say where the engine is; weak, for the life of the groups"
    ),
    "engine/buckets/home.py: OffloadedHome.tell keeps moved": (
        "the update is made of the weights, whose home moves the memory that the update's spans are parts of"
    ),
    "engine/verification.py: bucket.gradient.watch = partial(self._note, bucket)": (
        "a verified step begins and ends while the bucket trains, and a plain run imports nothing of it"
    ),
    "engine/verification.py: bucket.weights.watch = partial(note_weights, bucket)": "likewise",
    "launching/exits.py: os._exit = _exit": "the interpreter's own, so that no exit is missed",
    "engine/state/save.py: bucket.weights.before_change = partial(self.keep, bucket)": (
        "a save begins and ends while the bucket trains"
    ),
}
_MAKERS = {"partial", "WeakMethod"}


def late_callables(text: str, functions: frozenset[str] = frozenset()) -> Iterator[str]:
    """Every place where an object that is made already is given a callable.

    Args:
        functions: names of functions and methods anywhere: a value of such a name is one.
    """
    tree = ast.parse(text)
    functions = functions | {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    own = frozenset(_of_properties(tree))
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and _is_callable(node.value, functions - own):
            for target in node.targets:
                if isinstance(target, ast.Attribute) and ast.unparse(target.value) not in ("self", "cls"):
                    yield ast.unparse(node)
    for cls in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
        for method in (node for node in cls.body if isinstance(node, ast.FunctionDef) and node.name != "__init__"):
            yield from (f"{cls.name}.{method.name} keeps {name}" for name in _kept_by(method))


def _of_properties(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and any("property" in ast.unparse(each) for each in node.decorator_list):
            yield node.name


def _is_callable(value: ast.expr, functions: frozenset[str]) -> bool:
    if isinstance(value, ast.Lambda):
        return True
    if isinstance(value, ast.Call):
        return ast.unparse(value.func).rpartition(".")[2] in _MAKERS
    return isinstance(value, ast.Name | ast.Attribute) and ast.unparse(value).rpartition(".")[2] in functions


def _kept_by(method: ast.FunctionDef) -> Iterator[str]:
    """The callables among a method's parameters that it keeps in its object, itself or in something it makes of it."""
    for each in [*method.args.posonlyargs, *method.args.args, *method.args.kwonlyargs]:
        if each.annotation is None or "Callable[" not in ast.unparse(each.annotation):
            continue
        made_of_it = {each.arg}
        for node in ast.walk(method):
            made = node.name if isinstance(node, ast.FunctionDef) and node is not method else None
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                made = node.targets[0].id
            if made is not None and made_of_it & {name.id for name in ast.walk(node) if isinstance(name, ast.Name)}:
                made_of_it.add(made)
        if any(_kept_in(node) in made_of_it for node in ast.walk(method)):
            yield each.arg


def _kept_in(node: ast.AST) -> str | None:
    """The name whose value a statement keeps in `self`."""
    if isinstance(node, ast.Assign) and isinstance(node.value, ast.Name):
        target = node.targets[0]
        target = target.value if isinstance(target, ast.Subscript) else target
        is_own = isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self"
        return node.value.id if is_own else None
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ("append", "add"):
        value = node.args[0] if node.args else None
        return value.id if ast.unparse(node.func).startswith("self.") and isinstance(value, ast.Name) else None
    return None


def found_in_the_package() -> list[str]:
    texts = {path: path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}
    return [f"{path.relative_to(PACKAGE)}: {each}" for path, text in texts.items() for each in late_callables(text)]


def test_no_object_is_given_a_callable_once_it_is_made_but_those_listed() -> None:
    assert sorted(found_in_the_package()) == sorted(LISTED)


def test_a_late_callable_is_seen_in_each_form() -> None:
    forms = [
        "weights.when_read = lambda: None",
        "bucket.weights.when_read = partial(touch, 1)",
        "def touched(): pass\nweights.when_read = touched",
        "class A:\n def f(self): pass\n def g(self): self.b.when_read = self.f",
        "class A:\n def tell(self, moved: Callable[[], None]): self._moved.append(moved)",
        "class A:\n def ask(self, describe: Callable[[], str]):\n  weak = WeakMethod(describe)\n  self.describe = weak",
    ]
    assert [len(list(late_callables(form))) for form in forms] == [1] * len(forms)
