"""All that a user's code, commands and tools stand on, one line each.

`public.txt` keeps the lines, `test_public.py` compares, and `python -m tests.contract.public` writes them anew.
"""

import contextlib
import functools
import importlib.util
import inspect
import io
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import hydra

from tests.zygote.client import Server, Zygote
from zerotrain.config.compose import known_keys, register_schema

REPOSITORY = Path(__file__).resolve().parents[2]
PROMISED = Path(__file__).with_name("public.txt")
PACKAGES = ("zerotrain", "zerotrain.checkpoint", "zerotrain.data", "zerotrain.models", "zerotrain.training")
CLASSES = ("zerotrain.ZeroEngine", "zerotrain.World", "zerotrain.training.Trainer")
RUN = (
    "data=synthetic",
    "model=mlp",
    "model.hidden_size=8",
    "data.seq_len=16",
    "train.max_steps=1",
    "train.micro_batch_size=2",
    "train.eval_batches=1",
    "launch.nproc_per_node=2",
    "launch.device=cpu",
    "launch.threads_per_rank=1",
    "hydra.run.dir=run",
)
MADE_BY_BUILD_ENGINE = "zerotrain.ZeroEngine"
"""Its constructor is nobody's."""
NAMED_BY_OTHERS = ("parameters", "tensors", "counts")
"""Fields of a manifest that hold what the model and the optimizer name."""
OPEN = ("config", "hyperparameters", "built_groups")
"""Fields of a manifest that hold what is listed above, or what an optimizer has."""


def lines(zygote: Zygote) -> list[str]:
    given = {
        "names, with their signatures": names,
        "names of zerotrain.api": names_of_api,
        "methods and properties of an engine, a world and a trainer": methods,
        "config keys, with type and default": config_keys,
        "settings that the default choices add": options,
        "config groups, with their choices": choices,
        "commands and their options": commands,
        "exit codes, as the commands tell them": exit_codes,
        "files of a run, and their fields": functools.partial(run, zygote),
    }
    return [line for title, part in given.items() for line in [f"== {title}", *part()]]


def with_comments(lines: list[str], promised: list[str]) -> list[str]:
    """The lines, each below the comments that it has among the promised ones. A line whose signature, value or options
    are new keeps those of the line that it takes the place of."""
    comments: dict[str, list[str]] = {}
    above: list[str] = []
    for line in promised:
        if line.startswith("#"):
            above.append(line)
            continue
        comments[line] = above
        if line not in lines:
            comments[_name(line)] = above
        above = []
    return [text for line in lines for text in [*comments.get(line, comments.get(_name(line), [])), line]]


def names() -> Iterator[str]:
    for package in PACKAGES:
        module = importlib.import_module(package)
        for name in sorted(module.__all__):
            path = f"{package}.{name}"
            yield path if path == MADE_BY_BUILD_ENGINE else f"{path}{_signature(getattr(module, name))}"


def names_of_api() -> Iterator[str]:
    module = importlib.import_module("zerotrain.api")
    for name, value in sorted(vars(module).items()):
        if not name.startswith("_") and getattr(value, "__module__", None) == module.__name__:
            yield f"zerotrain.api.{name}{_signature(value)}"


def methods() -> Iterator[str]:
    for path in CLASSES:
        package, _, name = path.rpartition(".")
        kind = getattr(importlib.import_module(package), name)
        for member in (each for each in dir(kind) if not each.startswith("_")):
            value = inspect.getattr_static(kind, member)
            value = value.__func__ if isinstance(value, classmethod | staticmethod) else value
            if isinstance(value, property) or (callable(value) and member not in inspect.signature(kind).parameters):
                yield f"{name}.{member}{_signature(value)}"


def config_keys() -> Iterator[str]:
    schema = importlib.import_module("zerotrain.config.schema")
    yield from _keys(schema.Config(), "")
    yield from _keys(schema.ModelSwitches(), "model.")
    yield from _keys(schema.DataSwitches(), "data.")
    yield from _keys(schema.OptimizerSwitches(), "optimizer.")


def options() -> Iterator[str]:
    """Each setting of the default config that the schema does not have, in order."""
    register_schema()
    with hydra.initialize_config_dir(config_dir=str(REPOSITORY / "conf"), version_base="1.3"):
        composed = hydra.compose("train")
    of_schema = {line.partition(":")[0] for line in config_keys()}
    yield from (name for name in known_keys(composed) if "." in name and name not in of_schema)


def choices() -> Iterator[str]:
    for group in sorted(each for each in (REPOSITORY / "conf").iterdir() if each.is_dir()):
        yield f"{group.name}: {', '.join(sorted(path.stem for path in group.glob('*.yaml')))}"


def commands() -> Iterator[str]:
    """The line of each command that `--help` begins with; `train` has the keys of the config."""
    yield from (" ".join(text.partition("\n\n")[0].split()) for text in _helps().values())


def exit_codes() -> Iterator[str]:
    """The sentence that a command's `--help` ends with, and those of `launching`."""
    for verb, text in _helps().items():
        if "Exit code" in text:
            yield f"{verb}: {' '.join(text[text.index('Exit code') :].split())}"
    exits = importlib.import_module("zerotrain.launching.exits")
    yield from (
        f"train: {name} {value}" for name, value in vars(exits).items() if name.isupper() and name != "STOP_SIGNALS"
    )


def run(zygote: Zygote) -> Iterator[str]:
    """What a run of one step leaves, and the fields of its files; its exit code, and that of a wrong setting."""
    with tempfile.TemporaryDirectory() as folder:
        yield f"train zero.stage=9: exit code {zygote.run(['zero.stage=9'], Path(folder)).code}"
        yield f"train: exit code {zygote.run(RUN, Path(folder)).code}"
        root = Path(folder, "run")
        yield from sorted(f"file {path.relative_to(root)}" for path in root.rglob("*") if path.is_file())
        yield from (f"result.json {field}" for field in _fields(json.loads((root / "result.json").read_text())))
        metrics = [json.loads(line) for line in (root / "metrics.jsonl").read_text().splitlines()]
        yield from (f"metrics.jsonl {field}" for field in sorted({f for each in metrics for f in _fields(each)}))
        [manifest] = root.glob("checkpoints/*/manifest.json")
        content = json.loads(manifest.read_text())
        yield from (f"manifest.json {field}" for field in _fields(content))
        yield f"manifest.json is {content['format']!r}, version {content['format_version']}"


def _helps() -> dict[str, str]:
    verbs = importlib.import_module("zerotrain.__main__").VERBS
    return {verb: _help(importlib.import_module(name).main) for verb, (name, _) in verbs.items() if verb != "train"}


def _help(main: Callable[[list[str]], object]) -> str:
    out, width = io.StringIO(), os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = "120"
    try:
        with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
            main(["--help"])
    finally:
        os.environ.pop("COLUMNS")
        os.environ |= {} if width is None else {"COLUMNS": width}
    return out.getvalue()


def _name(line: str) -> str:
    """A line without its signature, value or options."""
    return re.split(r"[(\[]|: ", line.removeprefix("usage: "))[0]


def _signature(value: Any) -> str:
    if isinstance(value, property):
        return f": {_named(inspect.signature(value.fget).return_annotation)}"
    is_function = inspect.isfunction(value.__init__ if isinstance(value, type) else value)
    if not is_function and not hasattr(value, "__struct_fields__"):
        return ""
    signature = inspect.signature(value)
    parts = [each.replace(annotation=_named(each.annotation)) for each in signature.parameters.values()]
    given = signature.replace(parameters=parts, return_annotation=_named(signature.return_annotation))
    return re.sub(r"<function .*? at 0x\w+>", "<function>", str(given))


class _Named(str):
    """A text that stands in a signature without quotes."""

    def __repr__(self) -> str:
        return str(self)


def _named(annotation: Any) -> Any:
    """An annotation without the module that its class lies in, which may move."""
    if annotation is inspect.Signature.empty:
        return annotation
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    text = re.sub(r"\b(?:\w+\.)+(?=\w)", "", text)
    return _Named(
        re.sub(r"ndarray\[(?:Any|tuple\[.*?\]), dtype\[\w+\]\]", "ndarray", text)
    )  # as numpy's release has it


def _keys(group: Any, prefix: str) -> Iterator[str]:
    for each in fields(group):
        value, name = getattr(group, each.name), f"{prefix}{each.name}"
        if is_dataclass(value):
            yield from _keys(value, f"{name}.")
        else:
            yield f"{name}: {_named(each.type)} = {value!r}"


def _fields(value: Any, prefix: str = "") -> list[str]:
    """The dotted names of all fields, those of a list's items once."""
    if isinstance(value, list):
        found = [field for each in value for field in _fields(each, f"{prefix}[]")]
        return list(dict.fromkeys(found))
    last = prefix.rpartition(".")[2]
    if not isinstance(value, dict) or last in OPEN:
        return [prefix]
    names = ((f"{prefix}." if prefix else "") + ("*" if last in NAMED_BY_OTHERS else name) for name in value)
    found = [field for name, each in zip(names, value.values(), strict=True) for field in _fields(each, name)]
    return list(dict.fromkeys(found)) or [prefix]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        server = Server(Path(folder))
        server.wait_until_ready()
        zygote = Zygote(Path(folder), Path(folder))
        text = with_comments(lines(zygote), PROMISED.read_text().splitlines())
        zygote.close()
        server.close()
    PROMISED.write_text("\n".join(text) + "\n")
