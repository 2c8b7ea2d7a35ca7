"""Which tensors of a file are which of the model's: by name, shape and kind. Nothing is read, and nothing changes."""

import difflib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path

import torch

from zerotrain.checkpoint.others.stored_weights import StoredTensor
from zerotrain.engine.results import LoadedWeights
from zerotrain.errors import listed

MAX_NAMES_SHOWN = 10
MAX_NAMES_COMPARED = 2000
"""To find the nearest of more takes seconds."""


@dataclass(eq=False)
class Wanted:
    """A tensor of the model."""

    names: list[str]
    """In the order of its modules; the first is what it is called in what is said."""
    tensor: torch.Tensor
    given: list[tuple[str, StoredTensor]] = field(default_factory=list)
    """Tensors that fit it, under which of its names. If a tied one has several, the last is read, as by PyTorch."""


def fitting_parts(tensors: Sequence[StoredTensor], wanted: Sequence[Wanted]) -> list[str]:
    """The parts of a file with most names of the model; several if it holds the model more than once. If no part has
    any, the one with most tensors."""
    homes = {name for each in wanted for name in each.names}
    names: dict[str, list[str]] = {}
    for given in tensors:
        names.setdefault(given.part, []).extend(given.names)
    fitting = {
        part: sum(_renaming(each, wanted, homes)[0](name) in homes for name in each) for part, each in names.items()
    }
    most = max(fitting.values(), default=0)
    if most > 0:
        return [part for part, num_names in fitting.items() if num_names == most]
    return [max(names, key=lambda part: len(names[part]), default="")]


def match(path: Path, tensors: Sequence[StoredTensor], wanted: Sequence[Wanted], part: str = "") -> LoadedWeights:
    """Give each tensor of the model what fits it in a part of a file, and tell what did not."""
    told = _told(part, [given for given in tensors if given.part != part])
    tensors = [given for given in tensors if given.part == part]
    homes = {name: each for each in wanted for name in each.names}
    rename, renamed = _renaming([name for given in tensors for name in given.names], wanted, homes)
    surplus, wrong_shape, wrong_dtype = [], [], []
    found: set[Wanted] = set()
    for given in tensors:
        name = next((name for name in map(rename, given.names) if name in homes), None)
        if name is None:
            surplus.append(given.names[0])
            continue
        home = homes[name]
        shape, dtype = tuple(home.tensor.shape), home.tensor.dtype
        found.add(home)
        if given.shape != shape:
            wrong_shape.append(f"{name} is of shape {given.shape} in it, and of shape {shape} in the model")
        elif home.tensor.numel() > 0 and _kind(given.dtype) != _kind(dtype):
            wrong_dtype.append(f"{name} is {given.kind} in it, and {str(dtype).removeprefix('torch.')} in the model")
        else:
            home.given.append((name, given))
    for each in wanted:
        each.given.sort(key=lambda given: each.names.index(given[0]))
    return LoadedWeights(
        path=path,
        num_loaded=sum(bool(each.given) for each in wanted),
        missing=tuple(each.names[0] for each in wanted if each not in found),
        surplus=tuple(surplus),
        wrong_shape=tuple(wrong_shape),
        wrong_dtype=tuple(wrong_dtype),
        renamed=renamed,
        part=told,
    )


def _told(part: str, beside: Sequence[StoredTensor]) -> str:
    """Which part was read and, by the first of their words that is another, which were not."""
    if not part and not beside:
        return ""
    own = [*part.split("."), ""]
    others: dict[str, None] = {}
    for given in beside:
        words = [*given.part.split("."), *given.names] if given.part else given.names
        shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(own, words, strict=False)))
        others[".".join(words[: shared + 1])] = None
    left = f", and nothing of {listed(list(others), MAX_NAMES_SHOWN)}" if others else ""
    return f"{f'its {part!r} was read' if part else 'the tensors outside its parts were read'}{left}"


def misfits(loaded: LoadedWeights) -> list[str]:
    """Tell what does not fit, a line for each kind of it; the same on every rank."""
    problems = []
    if loaded.missing:
        problems.append(f"it lacks {_listed(loaded.missing, loaded.surplus)}; or give strict=False")
    if loaded.surplus:
        problems.append(f"the model has no {_listed(loaded.surplus, loaded.missing)}; or give strict=False")
    problems += [*loaded.wrong_shape, *loaded.wrong_dtype]
    said = [f"{loaded.path} does not fit the engine: {each}" for each in problems]
    told = "; ".join(filter(None, (loaded.part, loaded.renamed)))
    return [*said, f"{loaded.path}: {told}"] if said and told else said


def _listed(names: Sequence[str], others: Sequence[str]) -> str:
    """Names, each with the one of others that is most like it."""
    said = list(names)
    for place, name in enumerate(names[:MAX_NAMES_SHOWN]):
        if nearest := difflib.get_close_matches(name, others[:MAX_NAMES_COMPARED], n=1):
            said[place] += f" (is it {nearest[0]}?)"
    return listed(said, MAX_NAMES_SHOWN)


def _renaming(
    names: Sequence[str], wanted: Sequence[Wanted], homes: Collection[str]
) -> tuple[Callable[[str], str], str]:
    """Find the function from names in the file to names in the model, and the line that reports it.

    Wrappers put a word before all names: DistributedDataParallel "module.", torch.compile "_orig_mod.", a class around
    a model of Hugging Face "model.". If no name fits as it is, and just one such word makes names fit, that word is
    used.
    """
    if any(name in homes for name in names):
        return str, ""
    own = [each.names[0] for each in wanted]
    before = [word for word in _common(names) if any(name.removeprefix(word) in homes for name in names)]
    lacked = [word for word in _common(own) if any(word + name in homes for name in names)]
    if len(before) + len(lacked) != 1:
        return str, ""
    if before:
        word = before[0]
        return lambda name: name.removeprefix(word), f"{word!r}, with which all names in it begin, was left out"
    word = lacked[0]
    return lambda name: word + name, f"{word!r}, with which all names of the model begin, was put before those in it"


def _common(names: Sequence[str]) -> Iterator[str]:
    """The words that all names begin with, up to each dot."""
    prefix = ""
    while names:
        first, dot, _ = names[0][len(prefix) :].partition(".")
        prefix += first + dot
        if not dot or not all(name.startswith(prefix) for name in names):
            return
        yield prefix


def _kind(dtype: torch.dtype | None) -> str:
    """Dtypes of one kind are turned into each other; what has 8 bits needs a scale that is not known here."""
    if dtype is None or (dtype.is_floating_point and dtype.itemsize == 1):
        return f"{dtype}"
    if dtype.is_floating_point or dtype.is_complex:
        return "complex" if dtype.is_complex else "float"
    return "bool" if dtype is torch.bool else "integer"
