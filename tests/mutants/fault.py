"""A small fault of the kind that a hand makes: where it is planted, and which tests must notice it."""

import ast
import re
import textwrap
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tests.mutants.changes import Change, Function

REPOSITORY = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Fault:
    """One change of one function, whatever file of the package holds it."""

    function: str
    """As `Class.method`, or as `function`; `module.function` where several modules have one of that name."""
    change: Change
    why: str
    """Tells the harm."""
    tests: str
    """Files within tests/, or "file::test", with blanks between. At least one must fail."""

    @property
    def file(self) -> str:
        """The file that holds the function, within the package.

        Raises:
            ValueError: no file holds it, or several do.
        """
        owner, _, name = self.function.rpartition(".")
        is_class = owner[:1].isupper() or owner[:1] == "_"
        fitting = _files_by_name().get(owner if is_class else name, [])
        if owner and not is_class:
            fitting = [file for file in fitting if Path(file).stem == owner]
        if len(fitting) != 1:
            raise ValueError(f"{self.function} is in {len(fitting)} files, not in one: {', '.join(fitting)}")
        return fitting[0]

    def planted_in(self, text: str) -> str:
        """The text of the file with the fault. All lines outside of the function stay as they are.

        Raises:
            ValueError: the file has no such function, the change has no place in it, or it changes nothing.
        """
        function = self._function(ast.parse(text))
        before = ast.dump(function)
        self.change.apply(function)
        if ast.dump(function) == before:
            raise ValueError(f"{self.change} changes nothing")
        first, last = function.lineno - 1, function.end_lineno
        function.decorator_list = []  # these lines stay
        lines = text.splitlines(keepends=True)
        new = textwrap.indent(ast.unparse(ast.fix_missing_locations(function)), " " * function.col_offset)
        return "".join([*lines[:first], new, "\n", *lines[last:]])

    def _function(self, module: ast.Module) -> Function:
        owner, _, name = self.function.rpartition(".")
        body: list[ast.stmt] = module.body
        if owner[:1].isupper() or owner[:1] == "_":
            body = next(node.body for node in body if isinstance(node, ast.ClassDef) and node.name == owner)
        named = [node for node in body if isinstance(node, Function) and node.name == name]
        if len(named) != 1:
            raise ValueError(f"{self.function} is there {len(named)} times")
        return named[0]


@cache
def _files_by_name() -> dict[str, list[str]]:
    """The files within the package that define a class or a function at their outermost level, by its name."""
    package = REPOSITORY / "zerotrain"
    files = dict[str, list[str]]()
    for path in sorted(package.rglob("*.py")):
        for name in re.findall(r"^(?:class|def|async def) (\w+)", path.read_text(), re.MULTILINE):
            files.setdefault(name, []).append(str(path.relative_to(package)))
    return files
