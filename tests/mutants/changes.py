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
        case ast.Call(func=inner) | ast.Subscript(value=inner) | ast.Await(value=inner) | ast.Expr(value=inner):
            return name_of(inner)
        case ast.Assign(targets=[inner, *_]) | ast.AnnAssign(target=inner) | ast.AugAssign(target=inner):
            return name_of(inner)
        case ast.Attribute(attr=name) | ast.Name(id=name) | ast.keyword(arg=str(name)):
            return name
        case ast.Raise(exc=ast.AST() as inner) | ast.Return(value=ast.AST() as inner):
            return name_of(inner)
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
    """Takes a statement away: a call, an assignment or a raise, by the last name of what it calls, sets or raises.

    "return", "if", "for", "while", "raise" and "continue" stand for all statements of that kind; a `with` is named by
    what it enters, and its body stays.
    """

    name: str
    nth: int | None = None

    def apply(self, function: Function) -> None:
        place = only([place for place in places(function) if self._fits(place.node)], self.nth, self)
        if isinstance(place.node, ast.With):
            body: ast.stmt = ast.If(test=ast.Constant(True), body=place.node.body, orelse=[])
            place.put(body)
        else:
            place.put(None)

    def _fits(self, node: ast.AST) -> bool:
        if isinstance(node, ast.With):
            return any(name_of(item.context_expr) == self.name for item in node.items)
        simple = ast.Expr | ast.Assign | ast.AnnAssign | ast.AugAssign | ast.Raise
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
class Without(Change):
    """An operand of `and`, `or` or an arithmetic operator is left out: the one that mentions a name."""

    name: str
    nth: int | None = None

    def apply(self, function: Function) -> None:
        pairs = [(whole, operand) for whole in places(function) for operand in _operands(whole.node)]
        fitting = [whole for whole, operand in pairs if mentions(operand, self.name)]
        whole = only(fitting, self.nth, self)
        operands = _operands(whole.node)
        rest = [operand for operand in operands if not mentions(operand, self.name)]
        if len(rest) != len(operands) - 1:
            raise ValueError(f"{self} fits several operands of one operator")
        if isinstance(whole.node, ast.BoolOp) and len(rest) > 1:
            whole.node.values = rest
        else:
            whole.put(rest[0])


@dataclass(frozen=True)
class Inner(Change):
    """A call is left out, and what it is called on or with stays: `x` of `sorted(x)`, `x.clone()` or `not x`."""

    name: str
    nth: int | None = None

    def apply(self, function: Function) -> None:
        place = only([place for place in places(function) if self._fits(place.node)], self.nth, self)
        match place.node:
            case ast.UnaryOp(operand=inner):
                place.put(inner)
            case ast.Call(func=ast.Attribute(value=inner), args=[]):
                place.put(inner)
            case ast.Call(args=[inner, *_]):
                place.put(inner)
            case _:
                raise ValueError(f"{self} leaves nothing")

    def _fits(self, node: ast.AST) -> bool:
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            return self.name == "not"
        return isinstance(node, ast.Call) and name_of(node) == self.name


@dataclass(frozen=True)
class Argument(Change):
    """An argument of a call becomes another, or goes: by its place, or by its name, under which it also comes."""

    call: str
    which: int | str
    new: str | None
    nth: int | None = None

    def apply(self, function: Function) -> None:
        calls = [place for place in places(function) if isinstance(place.node, ast.Call)]
        node = only([place for place in calls if name_of(place.node) == self.call], self.nth, self).node
        assert isinstance(node, ast.Call)
        if isinstance(self.which, int):
            if self.which >= len(node.args):
                raise ValueError(f"{self} has no such argument")
            node.args[self.which : self.which + 1] = [] if self.new is None else [parse(self.new)]
            return
        others = [keyword for keyword in node.keywords if keyword.arg != self.which]
        if self.new is None and len(others) == len(node.keywords):
            raise ValueError(f"{self} has no such argument")
        node.keywords = others + ([] if self.new is None else [ast.keyword(self.which, parse(self.new))])


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


@dataclass(frozen=True)
class Both(Change):
    """Two changes of one function."""

    first: Change
    second: Change

    def apply(self, function: Function) -> None:
        self.first.apply(function)
        self.second.apply(function)


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


def _operands(node: ast.AST) -> list[ast.expr]:
    if isinstance(node, ast.BoolOp):
        return node.values
    return [node.left, node.right] if isinstance(node, ast.BinOp) else []
