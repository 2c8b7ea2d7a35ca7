"""Values and settings as they are written on the command line, and what the engine says in these words.

comm, sharding and the engine know the arguments of `zerotrain.build_engine`, and no config: `max_grad_norm`,
`compile=True`. A user of the config must read `train.max_grad_norm`, `model.compile=true`. Dotted names, such as
`zero.units`, are the same for both.
"""

import ast
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from zerotrain.errors import ConfigError, ZeroTrainError

SETTINGS = {
    "compile": "model.compile",
    "activation_checkpointing": "model.activation_checkpointing",
    "max_grad_norm": "train.max_grad_norm",
    "max_skipped_steps": "train.max_skipped_steps",
    "virtual_ranks": "train.virtual_ranks",
    "param_groups": "optimizer.groups",
    "World.from_environment(device)": "launch.device",
    "World.from_environment(timeout_s)": "launch.timeout_s",
    "World.from_environment(start_timeout_s)": "launch.start_timeout_s",
    "World.from_environment(interface)": "launch.interface",
    "MuonWithAdamW(matrices)": "optimizer.matrices",
}
"""Argument in Python -> setting; in parentheses what is no argument of `build_engine`."""

PHRASES = {
    "zerotrain.MuonWithAdamW(...)": "optimizer=muon",
    "(max_skipped_steps)": "(train.on_nonfinite=skip, train.max_skipped_steps)",
    "the optimizer's lr": "optimizer.lr",
    "strict=False": "checkpoint.strict=false",
    "set `whole_tensor = True` in its class": "choose optimizer.whole_tensor=true",
    "its class says `whole_tensor = True`": "optimizer.whole_tensor=true",
    "torchrun --nproc-per-node=": "launch.nproc_per_node=",
}
"""Phrases that the config words differently altogether."""

_LITERAL = r"""True|False|None|"[^"]*"|'[^']*'|\[[^\]]*\]"""
_CALL = re.compile(rf"(?:zerotrain\.)?\b(\w+(?:\.\w+)?)\((\w+)=({_LITERAL}|\.\.\.)\)")
"""Such as MuonWithAdamW(matrices='auto'), or MuonWithAdamW(matrices=...) where the value does not matter."""
_NAMES = "|".join(name for name in SETTINGS if "_" in name and "(" not in name)
# What is also a word of English, "compile" and "precision", is an argument only before a value.
_ARGUMENT = re.compile(rf"(?<![\w.])({_NAMES}|compile(?==)|precision(?==)|zero\.\w+)\b(?:=({_LITERAL}))?")
"""Such as max_grad_norm, compile=True or zero.overlap=False."""


def word(value: Any) -> str:
    """A value as it is written on the command line."""
    if value is None:
        return "null"
    if value == "":
        return "''"
    return str(value).lower() if isinstance(value, bool) else str(value)


def in_words_of_config(text: str) -> str:
    """A message of comm, sharding or the engine, in words of the config."""
    for phrase, said in PHRASES.items():
        text = text.replace(phrase, said)
    text = _CALL.sub(lambda call: _named(f"{call[1]}({call[2]})", call[3], call[0]), text)
    return _ARGUMENT.sub(lambda argument: _named(argument[1], argument[2], argument[0]), text)


@contextmanager
def words_of_config() -> Iterator[None]:
    """In here what zerotrain raises on purpose speaks of the config; it stays the same exception, with its cause."""
    try:
        yield
    except ZeroTrainError as error:
        error.args = tuple(in_words_of_config(str(part)) for part in error.args)
        if isinstance(error, ConfigError):
            error.problems = tuple(in_words_of_config(problem) for problem in error.problems)
        raise


def _named(argument: str, literal: str | None, text: str) -> str:
    """The setting that `argument` is, with its value; `text` as it was where there is no such setting."""
    setting = argument if argument.startswith(("zero.", "precision")) else SETTINGS.get(argument)
    if setting is None:
        return text
    return setting if literal in (None, "...") else f"{setting}={_respelled(literal)}"


def _respelled(literal: str) -> str:
    """A value of Python on the command line: no quotes, and in a list no blanks, which a shell would part it at."""
    try:
        value = ast.literal_eval(literal)
    except (SyntaxError, ValueError):
        return literal
    return f"[{','.join(map(str, value))}]" if isinstance(value, list) else word(value)
