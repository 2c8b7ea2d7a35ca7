"""Writes reference/messages/ from the code, with an index in reference/messages.md: `python docs/messages.py`. A test
says when a page is old."""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from zerotrain.errors import argument, naming_settings

REPOSITORY = Path(__file__).resolve().parents[1]
PACKAGE = REPOSITORY / "zerotrain"
INDEX = REPOSITORY / "docs/reference/messages.md"
PAGES = INDEX.with_suffix("")
INDEX_HEAD = "## Every message\n"
"""Begins the part of the index that is written here; the rest is written by hand."""
MIN_WORDS = 3
"""Words of a text that a person reads; a shorter one is a name or a part of a message."""
TOPICS = {
    "commands": ("The commands beside training", ("commands", "report", "__main__.py")),
    "schedulers": (
        "The commands ended, alive and slurm",
        ("commands/ended.py", "commands/alive.py", "commands/slurm.py"),
    ),
    "replay": ("The command replay", ("commands/replay.py", "replay")),
    "export": (
        "The command export",
        ("commands/export.py", "commands/export_folder.py", "commands/export_dcp.py", "commands/export_formats.py"),
    ),
    "config": ("Settings and yamls", ("config", "settings.py")),
    "launching": ("Start, restart and end of a run", ("launching",)),
    "run": (
        "Checks before a run, and what a run has left",
        ("run", "preflight", "saved", "api.py", "errors.py", "__init__.py"),
    ),
    "training": ("Training", ("training",)),
    "callbacks": ("The callbacks of a run", ("training/callbacks",)),
    "models": ("Models", ("models",)),
    "data": ("Data sets and their rows", ("data",)),
    "data_files": (
        "Files of text and tokens, and how they are prepared",
        tuple(f"data/{name}.py" for name in ("formats", "prepare", "store", "text_files", "tokenizer", "windows")),
    ),
    "engine": ("The engine", ("engine",)),
    "engine_groups": ("Optimizers and parameter groups", ("engine/groups", "engine/optimizer_step.py", "engine/model")),
    "engine_state": ("Saving and loading", ("engine/state", "engine/engine.py")),
    "checkpoint": ("Checkpoints and other files with weights", ("checkpoint",)),
    "comm": ("Communication between ranks", ("comm",)),
    "machine": ("Files, devices and memory", ("files", "device", "offload", "sharding")),
}
"""Page -> (title, folders and files of the package)."""


@dataclass(frozen=True)
class Message:
    """A text of the code that a person reads."""

    path: str
    line: int
    kind: str
    """Class of the error that it is raised as, or the function that prints it; empty where that is elsewhere."""
    text: str


def text_of(node: ast.expr) -> str | None:
    """The text of a string, with its placeholders; None: no string."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(each) or placeholder(each) for each in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        parts = (text_of(node.left), text_of(node.right))
        return "".join(part or "{...}" for part in parts) if any(parts) else None
    return None


def placeholder(node: ast.expr) -> str:
    """A value in a text: its name, or that of the only thing it is made of."""
    if isinstance(node, ast.FormattedValue):
        return placeholder(node.value)
    if isinstance(node, ast.Name):
        return f"{{{node.id}}}"
    if isinstance(node, ast.Attribute) and re.fullmatch(r"\{\w[\w.]*\}", owner := placeholder(node.value)):
        return f"{owner[:-1]}.{node.attr}}}"
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "argument":
        values = [repr(arg.value) if isinstance(arg, ast.Constant) else placeholder(arg) for arg in node.args[1:]]
        with naming_settings({}, str):  # values as they stand
            return argument(text_of(node.args[0]) or "{...}", *values)
    if isinstance(node, ast.Call) and len(node.args) == 1 and not node.keywords:
        return placeholder(node.args[0])
    return "{...}"


def is_message(text: str) -> bool:
    """Whether a person reads it: words with spaces between, and no pattern or code."""
    words = re.findall(r"(?<![\w.{])[A-Za-z][A-Za-z'-]*(?![\w.=(}])", text)
    is_code = re.search(r"\(\?|\(\.[+*]|\\[SswWdD(]|\$0|\]\*|%Y", text)
    return len(words) >= MIN_WORDS and " " in text.strip() and is_code is None


def kind_of(node: ast.AST, inside: str) -> str:
    """What is made of the strings below a node: an error, a printed line, or what is made of those above it."""
    if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
        return ast.unparse(node.exc.func)
    if isinstance(node, ast.Call):
        name = ast.unparse(node.func).rpartition(".")[2]
        if name in ("say", "_say", "print", "warn", "add_argument") or name.endswith(("Error", "Problem", "Failure")):
            return "help" if name == "add_argument" else name.removeprefix("_")
    return inside


def messages_in(node: ast.AST, path: str, inside: str = "") -> Iterator[Message]:
    """The messages of a piece of code, in order. Strings that stand alone are its documentation."""
    for child in ast.iter_child_nodes(node):
        is_documentation = isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant)
        if is_documentation or isinstance(child, ast.Compare):  # what is compared was said by somebody else
            continue
        kind = kind_of(child, inside)
        text = text_of(child) if isinstance(child, ast.expr) else None
        if text is None:
            yield from messages_in(child, path, kind)
        elif is_message(text):
            yield Message(path, child.lineno, kind, text)
        else:
            for each in ast.walk(child):
                inner = text_of(each) if each is not child and isinstance(each, ast.expr) else None
                if inner is not None and is_message(inner):
                    yield Message(path, each.lineno, kind, inner)


def topic_of(path: str) -> str:
    """The page of a file: that with the longest folder of it."""
    found = [
        (len(part), name) for name, (_, parts) in TOPICS.items() for part in parts if f"{path}/".startswith(f"{part}/")
    ]
    return max(found)[1] if found else "machine"


def all_messages() -> dict[str, list[Message]]:
    """Page -> its messages, each text of a file once."""
    found: dict[str, list[Message]] = {name: [] for name in TOPICS}
    for file in sorted(PACKAGE.rglob("*.py")):
        path = str(file.relative_to(PACKAGE))
        of_file = {(each.kind, each.text): each for each in messages_in(ast.parse(file.read_text()), path)}
        found[topic_of(path)] += of_file.values()
    return found


def shown(text: str) -> str:
    """A message as code within a table."""
    fence = "``" if "`" in text else "`"
    inner = " ".join(text.split()).replace("|", "\\|")
    return f"{fence} {inner} {fence}" if fence == "``" else f"{fence}{inner}{fence}"


def page(name: str, messages: list[Message]) -> str:
    """The page of a topic as it should be."""
    lines = [
        f"# {TOPICS[name][0]}: which messages are there?",
        "",
        "`python docs/messages.py` writes this page from the code: do not edit it. `{...}` is a value.",
        "[All topics](../messages.md#every-message)",
        "",
        "| where in zerotrain/ | as | message |",
        "|---|---|---|",
    ]
    return "\n".join([*lines, *(f"| {each.path} | {each.kind} | {shown(each.text)} |" for each in messages)]) + "\n"


def index() -> str:
    """The index: its part by hand, and a line for each topic."""
    by_hand = INDEX.read_text().partition(INDEX_HEAD)[0].rstrip()
    lines = [f"- [{title}](messages/{name}.md)" for name, (title, _) in TOPICS.items()]
    return "\n".join([by_hand, "", INDEX_HEAD, *lines]) + "\n"


def pages() -> dict[Path, str]:
    """Each page, with the index, as it should be."""
    found = all_messages()
    return {INDEX: index()} | {PAGES / f"{name}.md": page(name, each) for name, each in found.items()}


if __name__ == "__main__":
    PAGES.mkdir(exist_ok=True)
    for path, text in pages().items():
        path.write_text(text)
