"""Small changes of a function's syntax tree. None of them knows a line, a comment, a layout or a module.

Each change finds its place by what stands there and refuses a function where that stands nowhere, or in several places
and `nth` does not say which (0 is the first in the text).
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass

Function = ast.FunctionDef | ast.AsyncFunctionDef
OPERATORS = {"<": ast.Lt, "<=": ast.LtE, ">": ast.Gt, ">=": ast.GtE, "+": ast.Add, "-": ast.Sub}


@dataclass(frozen=True)
class Place:
    """A node, and where its parent holds it."""

    node: ast.AST
    parent: ast.AST
    field: str

    def put(self, new: ast.AST | None) -> None:
        """Put another node here; None takes the node away."""
        siblings = getattr(self.parent, self.field)
        if not isinstance(siblings, list):
            setattr(self.parent, self.field, new)
            return
        at = next(index for index, sibling in enumerate(siblings) if sibling is self.node)
        siblings[at : at + 1] = [] if new is None else [new]
        if not siblings and isinstance(self.node, ast.stmt):
            siblings.append(ast.Pass())


def places(root: ast.AST) -> Iterator[Place]:
    """All places below a node, in the order of the text."""
    for field, value in ast.iter_fields(root):
        for child in list(value) if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield Place(child, root, field)
                yield from places(child)


def only(fitting: list[Place], nth: int | None, change: object) -> Place:
    """The only place, or the nth.

    Raises:
        ValueError: there is no such place, or there are several.
    """
    if len(fitting) > (nth or 0) and (nth is not None or len(fitting) == 1):
        return fitting[nth or 0]
    raise ValueError(f"{change} fits {len(fitting)} places")


def name_of(node: ast.AST) -> str:
    """The last name of a call, a target or a name: "wait" of `self._queue.wait(1)`."""
    match node:
        case ast.Call(func=inner) | ast.Subscript(value=inner) | ast.Expr(value=inner):
            return name_of(inner)
        case ast.Assign(targets=[inner, *_]) | ast.AnnAssign(target=inner) | ast.AugAssign(target=inner):
            return name_of(inner)
        case ast.Attribute(attr=name) | ast.Name(id=name):
            return name
    return ""


def parse(text: str) -> ast.expr:
    return ast.parse(text, mode="eval").body


class Change:
    def apply(self, function: Function) -> None:
        """Change the function.

        Raises:
            ValueError: the change has no place in it, or several.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class Drop(Change):
    """Takes a statement away: a call or an assignment, by the last name of what it calls or sets; "return", "if", "for"
    and "raise" stand for all statements of that kind."""

    name: str
    nth: int | None = None

    def apply(self, function: Function) -> None:
        only([place for place in places(function) if self._fits(place.node)], self.nth, self).put(None)

    def _fits(self, node: ast.AST) -> bool:
        simple = ast.Expr | ast.Assign | ast.AnnAssign | ast.AugAssign
        is_kind = isinstance(node, ast.stmt) and type(node).__name__.lower() == self.name
        return is_kind or (isinstance(node, simple) and name_of(node) == self.name)


@dataclass(frozen=True)
class Always(Change):
    """A condition of an `if`, a `while`, a comprehension or an `a if b else c` comes out the same always.

    It is the only one, or the one that mentions a name.
    """

    value: bool
    name: str | None = None
    nth: int | None = None

    def apply(self, function: Function) -> None:
        tests = [id(test) for node in ast.walk(function) for test in _tests(node)]
        fitting = [place for place in places(function) if id(place.node) in tests and self._fits(place.node)]
        only(fitting, self.nth, self).put(ast.Constant(self.value))

    def _fits(self, test: ast.AST) -> bool:
        return self.name is None or mentions(test, self.name)


@dataclass(frozen=True)
class Swap(Change):
    """An expression, or an operator, becomes another, however it is laid out."""

    old: str
    new: str
    nth: int | None = None

    def apply(self, function: Function) -> None:
        if self.old in OPERATORS:
            fitting = [place for place in places(function) if isinstance(place.node, OPERATORS[self.old])]
            only(fitting, self.nth, self).put(OPERATORS[self.new]())
        else:
            shape = _shape(parse(self.old))
            fitting = [place for place in places(function) if _shape(place.node) == shape]
            only(fitting, self.nth, self).put(parse(self.new))


def mentions(node: ast.AST, name: str) -> bool:
    """Whether a name, an attribute or a text stands in an expression."""
    for each in ast.walk(node):
        if isinstance(each, ast.Name | ast.Attribute) and name_of(each) == name:
            return True
        if isinstance(each, ast.Constant) and str(each.value) == name:
            return True
    return False


def _shape(node: ast.AST) -> str:
    return ast.dump(node).replace("ctx=Store()", "ctx=Load()")


def _tests(node: ast.AST) -> list[ast.expr]:
    if isinstance(node, ast.If | ast.While | ast.IfExp):
        return [node.test]
    return node.ifs if isinstance(node, ast.comprehension) else []
