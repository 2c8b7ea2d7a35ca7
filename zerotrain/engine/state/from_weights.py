"""Files of others as a source, with weights to start from: all is checked first, then each rank reads what it holds."""

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch

from zerotrain.checkpoint.others.weights import find_weights, resolve_weights
from zerotrain.checkpoint.tensor_file import CHUNK_NUMEL, Weights, read_box
from zerotrain.comm.collectives import Collectives
from zerotrain.comm.handles import require_tellable
from zerotrain.engine.buckets.bucket import Bucket
from zerotrain.engine.results import LoadedWeights
from zerotrain.engine.state.fill import Source
from zerotrain.engine.state.named import Holdings, NamedPiece, buffers
from zerotrain.engine.state.together import LEFT, attempt, from_rank_0, on_all, raise_first
from zerotrain.errors import CheckpointError, ConfigError, EngineStateError, ZeroTrainError, argument, listed
from zerotrain.files import match
from zerotrain.files.match import ModelTensor, StoredTensor
from zerotrain.sharding.layout import slot_view
from zerotrain.sharding.units import ModelParameter, model_parameters

# The part of a file to read, and its names. Nothing is read here, and nothing changes.


def match_weights(path: Path, tensors: Sequence[StoredTensor], targets: Sequence[ModelTensor]) -> LoadedWeights:
    """Give each tensor of the model what fits it in a file, and report the rest.

    The part of a file with most names of the model is taken, or the one with most tensors if no part has any.

    Raises:
        CheckpointError: several parts have as many names of the model.
    """
    parts: dict[str, list[StoredTensor]] = {}
    for tensor in tensors:
        parts.setdefault(tensor.part, []).append(tensor)
    homes = {name for target in targets for name in target.names}
    ranked = []
    for part, part_tensors in parts.items():
        names = [name for tensor in part_tensors for name in tensor.names]
        rename, renamed = _renaming(names, targets, homes)
        num_fitting = sum(rename(name) in homes for name in names)
        ranked.append((num_fitting, 0 if num_fitting else len(names), part, rename, renamed))
    best = max(ranked, key=lambda entry: entry[:2], default=(0, 0, "", str, ""))
    num_fitting, _, part, rename, renamed = best
    alike = [other for num_names, _, other, *_ in ranked if num_names == num_fitting]
    if num_fitting and len(alike) > 1:
        raise CheckpointError(
            f"{path} has the names of the model several times, in {', '.join(alike)}: give a file that has one of them"
        )
    description = _describe_part(part, [tensor for tensor in tensors if tensor.part != part])
    matched = match.match(parts.get(part, ()), targets, rename=rename)
    num_loaded = sum(bool(target.stored) for target in targets)
    return LoadedWeights(path=path, num_loaded=num_loaded, renamed=renamed, part=description, **vars(matched))


def _describe_part(part: str, rest: Sequence[StoredTensor]) -> str:
    """A sentence about the part to read, and about the others by the first of their words to differ."""
    if not part and not rest:
        return ""
    own = [*part.split("."), ""]
    other_parts: dict[str, None] = {}
    for tensor in rest:
        words = [*tensor.part.split("."), *tensor.names] if tensor.part else tensor.names
        shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(own, words, strict=False)))
        other_parts[".".join(words[: shared + 1])] = None
    ignored = f", and nothing of {listed(list(other_parts), match.MAX_NAMES_SHOWN)}" if other_parts else ""
    return f"{f'its {part!r} was read' if part else 'the tensors outside its parts were read'}{ignored}"


def misfits(loaded: LoadedWeights) -> list[str]:
    """The lines about misfits, one for each kind; the same on every rank."""
    misfits = match.Misfits(loaded.missing, loaded.surplus, loaded.wrong_shape, loaded.wrong_dtype)
    problems = misfits.problems(f"; or give {argument('strict', False)}")
    lines = [f"{loaded.path} does not fit the engine: {problem}" for problem in problems]
    notes = "; ".join(filter(None, (loaded.part, loaded.renamed)))
    return [*lines, f"{loaded.path}: {notes}"] if lines and notes else lines


def _renaming(
    names: Sequence[str], targets: Sequence[ModelTensor], homes: Collection[str]
) -> tuple[Callable[[str], str], str]:
    """Find the function from names in the file to names in the model, and the line to report it.

    Wrappers put a word before all names: DistributedDataParallel "module.", torch.compile "_orig_mod.", a class around
    a model of Hugging Face "model.". The word is used if no name fits as it is, and no other word makes names fit.
    """
    ways: list[tuple[str, str, str]] = []
    for word in _common(names):
        ways.append((word, "", f"{word!r}, with which all names in it begin, was left out"))
    for word in _common([target.names[0] for target in targets]):
        ways.append(("", word, f"{word!r}, with which all names of the model begin, was put before those in it"))
    fitting = [way for way in ways if any(way[1] + name.removeprefix(way[0]) in homes for name in names)]
    if len(fitting) == 1 and not any(name in homes for name in names):
        left_out, put_before, line = fitting[0]
        return lambda name: put_before + name.removeprefix(left_out), line
    return str, ""


def _common(names: Sequence[str]) -> Iterator[str]:
    """The words that all names begin with, up to each dot."""
    prefix = ""
    while names:
        word, dot, _ = names[0][len(prefix) :].partition(".")
        prefix += word + dot
        if not dot or not all(name.startswith(prefix) for name in names):
            return
        yield prefix


class Files(Source):
    """Weights checked for an engine, open. Parameters that they lack stay as they are.

    Args:
        targets: the model's tensors, and the part of `weights` that each gets.
        loaded: the report about it.
    """

    def __init__(
        self, weights: Weights, targets: Sequence[ModelTensor], loaded: LoadedWeights, holdings: Holdings
    ) -> None:
        self.doing, self.loaded = f"loading weights from {weights.path}", loaded
        self._weights, self._holdings = weights, holdings
        self._stored = {id(target.tensor): target.stored[-1][1] for target in targets if target.stored}

    def read(self, piece: NamedPiece) -> None:
        source = self._stored.get(id(piece.managed.parameter))
        if source is not None and piece.in_tensor is not None:
            read = partial(self._weights.fill, source)
            read_box(read, source, piece.managed.stride, -piece.in_tensor.start, piece.values)

    def fill_rest(self) -> None:
        for tensor in buffers(self._holdings.model, self._holdings.buckets).values():
            if (source := self._stored.get(id(tensor))) is not None and tensor.numel() > 0:
                values = torch.empty(tensor.numel(), dtype=source.dtype)
                self._weights.fill(source, 0, values)
                tensor.data.copy_(values.view(tensor.shape))


@contextmanager
def checked_weights(
    path: str | os.PathLike[str], holdings: Holdings, *, strict: bool, averaged: bool = False
) -> Iterator[Files]:
    """Find weights and check all about them but their values. Collective.

    Raises:
        CheckpointError: on every rank, before anything has changed.
    """
    collectives, location = holdings.collectives, Path(os.path.abspath(path))
    rank, size, doing = collectives.shards.rank, collectives.shards.size, f"loading weights from {location}"

    def check(weights: Weights, fingerprints: Sequence[str]) -> Files:
        for other, fingerprint in enumerate(fingerprints):
            if fingerprint != fingerprints[0]:
                raise CheckpointError(f"{weights.path} is another on rank {other} than on rank 0")
        rest = buffers(holdings.model, holdings.buckets)
        targets = _model_tensors(holdings.model, holdings.parameters.values(), rest)
        loaded = match_weights(weights.path, weights.tensors, targets)
        if strict and (problems := misfits(loaded)):
            raise CheckpointError("\n".join(problems))
        stored = [tensor for target in targets for _, tensor in target.stored]
        if problems := [*weights.problems(stored, rank, size), *_two_in_one(weights, targets, rank, size)]:
            raise CheckpointError("\n".join(problems))
        return Files(weights, targets, loaded, holdings)

    # Rank 0's newest: its run may save another meanwhile.
    source = from_rank_0(collectives, lambda: str(resolve_weights(location)), doing=doing)
    weights, error = attempt(lambda: find_weights(Path(source), averaged=averaged))
    with closing(weights) if weights is not None else nullcontext():
        raise_first(collectives, error, doing=doing, outcome=LEFT)
        assert weights is not None
        fingerprints = collectives.gather_objects(weights.fingerprint, name=doing)
        yield on_all(collectives, lambda: check(weights, fingerprints), doing=doing, outcome=LEFT)


def weight_misfits(path: str | os.PathLike[str], model: torch.nn.Module, *, averaged: bool = False) -> list[str]:
    """The misfits of weights and a model, a line for each kind, from headers alone: before there is an engine, and of a
    model without memory too. None if the weights cannot be read."""
    with suppress(CheckpointError), closing(find_weights(path, averaged=averaged)) as weights:
        parameters = model_parameters(model)
        ours = {id(managed.parameter) for managed in parameters}
        rest = {name: tensor for name, tensor in buffers(model, []).items() if id(tensor) not in ours}
        try:
            return misfits(match_weights(weights.path, weights.tensors, _model_tensors(model, parameters, rest)))
        except CheckpointError as error:
            return [str(error)]
    return []


def _model_tensors(
    model: torch.nn.Module, parameters: Iterable[ModelParameter], rest: Mapping[str, torch.Tensor]
) -> list[ModelTensor]:
    """Parameters and buffers by all their names: those of their modules, and those in `state_dict()` after hooks."""
    own = [(name, managed.parameter) for managed in parameters for name in managed.names] + [*rest.items()]
    ids = {id(tensor) for _, tensor in own}
    # Without detaching them: that would read sharded parameters.
    also = [(name, value) for name, value in model.state_dict(keep_vars=True).items() if id(value) in ids]
    return match.model_tensors([*own, *also])


def _two_in_one(weights: Weights, targets: list[ModelTensor], rank: int, size: int) -> Iterator[str]:
    """Tied tensors of the model with several values in the file; each rank looks at a share of their elements."""
    for target in targets:
        for (name, tensor), (other_name, other) in zip(target.stored, target.stored[1:], strict=False):
            numel = target.tensor.numel()
            if not _same(weights, tensor, other, numel * rank // size, numel * (rank + 1) // size):
                yield (
                    f"{weights.path} does not fit the engine: {name} and {other_name} are one tensor in the model, and "
                    "two with other values in it"
                )


def _same(weights: Weights, tensor: StoredTensor, other: StoredTensor, start: int, stop: int) -> bool:
    order, other_order = match.memory_order(tensor.shape, tensor.stride), match.memory_order(other.shape, other.stride)
    if tensor.dtype != other.dtype or order != other_order:
        return False
    for offset in range(start, stop, CHUNK_NUMEL):
        values, other_values = (torch.empty(min(CHUNK_NUMEL, stop - offset), dtype=tensor.dtype) for _ in range(2))
        weights.fill(tensor, offset, values)
        weights.fill(other, offset, other_values)
        if not torch.equal(values.view(torch.uint8), other_values.view(torch.uint8)):
            return False
    return True


# A dict of full weights as a source: rank 0 has it, and sends it one bucket at a time.


class StateDict(Source):
    """Full weights by the names of `model.state_dict()`. Only rank 0 must give them.

    Raises:
        ConfigError: on rank 0; it is no dict.
        EngineStateError: on rank 0; it holds what ranks cannot tell each other.
    """

    is_collective = True

    def __init__(
        self,
        model: torch.nn.Module,
        buckets: Sequence[Bucket],
        collectives: Collectives,
        state: Mapping[str, Any],
        *,
        strict: bool,
    ) -> None:
        self._model, self._collectives = model, collectives
        self._own = model.state_dict(keep_vars=True)  # without detaching them: that would read sharded parameters
        in_buckets = {id(managed.parameter) for bucket in buckets for managed in bucket.spec.parameters}
        self._outside = {name: value for name, value in self._own.items() if id(value) not in in_buckets}
        """The model's tensors in no bucket, and what modules keep beside their tensors, by name."""
        self._state: Mapping[str, Any] = {}
        self._name_of: dict[int, str] = {}
        """A name in the dict, by the id of each parameter there."""
        self._problems: list[str] = []
        self._replaced: dict[str, Any] = {}
        """By name what the dict has of `_outside`: None for a tensor, and otherwise the value."""
        self._members: set[int] = set()
        self._whole: torch.Tensor | None = None
        if collectives.shards.rank != 0:
            return
        if not isinstance(state, Mapping):
            got = type(state).__name__
            raise ConfigError(f"load_state_dict: got a {got}; give what engine.full_state_dict() gives, a dict by name")
        self._state = state
        self._name_of = {id(self._own[name]): name for name in reversed(self._own) if name in state}
        self._problems = _problems(self._own, state, strict)
        for name, value in self._outside.items():
            if name in state:
                self._replaced[name] = None if isinstance(value, torch.Tensor) else state[name]
        require_tellable(self._replaced)

    def agree(self) -> None:
        """Compare names on all ranks, and load what lies in no bucket: a module may refuse it. Collective, before
        `fill`.

        Raises:
            ConfigError: on every rank, before anything has changed: names that are missing or unknown, other shapes.
            CheckpointError: likewise; a module does not take what it is to keep beside its tensors.
        """
        message = self._problems, [*self._name_of.values()], self._replaced
        problems, names, replaced = self._collectives.gather_objects(message, name="what is loaded")[0]
        if problems:
            raise ConfigError(*problems)
        self._members = {id(self._own[name]) for name in names}
        self._load_outside(replaced)

    def begin(self, bucket: Bucket, role: str) -> None:
        self._whole = None
        if any(id(managed.parameter) in self._members for managed in bucket.spec.parameters):
            whole = torch.zeros(bucket.layout.padded_numel, dtype=torch.float32, device=self._collectives.world.device)
            for slot, managed in zip(bucket.layout.slots, bucket.spec.parameters, strict=True):
                if (name := self._name_of.get(id(managed.parameter))) is not None:
                    slot_view(whole, slot).copy_(self._state[name])
            self._collectives.broadcast(whole, name=bucket.spec.name)
            self._whole = whole

    def read(self, piece: NamedPiece) -> None:
        if self._whole is not None and id(piece.managed.parameter) in self._members:
            piece.values.copy_(self._whole[piece.in_bucket])

    def _load_outside(self, replaced: Mapping[str, Any]) -> None:
        """Load buffers, and what modules keep beside their tensors, by PyTorch itself."""
        former, loaded = dict(self._outside), dict(replaced)
        for name, value in self._outside.items():
            if isinstance(value, torch.Tensor):
                former[name] = value.detach().clone(memory_format=torch.contiguous_format)
                if name in loaded:
                    tensor = loaded[name] = former[name].clone()
                    if name in self._state:
                        tensor.copy_(self._state[name])
                    if tensor.numel() > 0:
                        # As bytes: backends do not send every dtype.
                        self._collectives.broadcast(tensor.view(-1).view(torch.uint8), name="buffers")
        try:
            on_all(
                self._collectives,
                lambda: self._model.load_state_dict(loaded, strict=False),
                doing="engine.load_state_dict",
                outcome=LEFT,
            )
        except ZeroTrainError:
            with suppress(Exception):  # the first cause is what the user reads
                self._model.load_state_dict(former, strict=False)
            raise


def _problems(own: Mapping[str, Any], state: Mapping[str, Any], strict: bool) -> list[str]:
    problems, tensors = [], []
    for name, value in state.items():
        target = own.get(name)
        shape: tuple[int, ...] = ()
        if isinstance(target, torch.Tensor):
            shape = tuple(target.shape)
            if _is_readable(value):
                shape = tuple(value.shape)
            else:
                got = f"a {type(value).__name__}"
                if isinstance(value, torch.Tensor):
                    got = f"a {value.layout} tensor on {value.device}"
                problems.append(f"load_state_dict: {name} is {got}; give a tensor that holds its numbers")
        tensors.append(StoredTensor([str(name)], "", None, shape))
    loaded = match.match(tensors, match.model_tensors(own.items()), kind=match.any_kind)
    if not strict:
        loaded = replace(loaded, missing=(), surplus=())
    lines = loaded.problems(f"; or give {argument('strict', False)}")
    return [*(f"load_state_dict: the dict does not fit the engine: {line}" for line in lines), *problems]


def _is_readable(value: Any) -> bool:
    """True for a tensor whose numbers can be copied one by one: not a sparse one, nor one without memory."""
    try:
        torch.zeros(()).copy_(value[(0,) * value.ndim] if value.numel() else value.sum())
    except EngineStateError:
        raise  # a parameter that is sharded says what to do
    except Exception:
        return False
    return isinstance(value, torch.Tensor) and value.layout is torch.strided
