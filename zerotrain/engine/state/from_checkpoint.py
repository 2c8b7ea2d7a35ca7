"""A checkpoint of any placement as a source: all is checked before anything changes, and each rank reads its own
elements."""

import os
from collections.abc import Iterator, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import msgspec
import torch

from zerotrain.checkpoint.manifest import AVERAGE, EXTRA_STATE, WEIGHT, Manifest, parse_manifest, read_manifest
from zerotrain.checkpoint.tensor_file import Reader
from zerotrain.checkpoint.verification import problems_in
from zerotrain.engine.groups import hyperparameters
from zerotrain.engine.groups.hyperparameters import restore_group, restored, without_objects
from zerotrain.engine.groups.param_groups import ParamGroups
from zerotrain.engine.state.fill import Keeps, KeptOnce, KeptTensor, Source, fill
from zerotrain.engine.state.named import Holdings, NamedPiece, buffers, modules_with_extra_state, restore_extra_states
from zerotrain.engine.state.together import LEFT, from_rank_0, on_all
from zerotrain.errors import CheckpointError
from zerotrain.files.match import ModelTensor, StoredTensor, any_kind, match, memory_order
from zerotrain.files.untrusted import shown
from zerotrain.sharding.units import ManagedParameter, ModelParameter

# The check for a checkpoint of this model and this optimizer; placement, precision, buckets may be others.


_KEEP = "keep the optimizer, or take the weights alone (engine.load_weights, checkpoint.init_from)"


def misfits(manifest: Manifest, holdings: Holdings) -> list[str]:
    """The misfits, a line for each; the same on every rank, and nothing is changed."""
    own, values = holdings.parameters, buffers(holdings.model, holdings.buckets)
    own_states = [name for name, _ in modules_with_extra_state(holdings.model)]
    saved_states = manifest.content.get(EXTRA_STATE, own_states)  # of an older checkpoint, without any: they stay
    targets = [ModelTensor(managed.names, managed.parameter) for managed in own.values()]
    problems = match(manifest.stored_weights(), targets, kind=any_kind).problems()
    problems += match(
        [*manifest.stored_buffers(), *(StoredTensor([name], "", None, ()) for name in saved_states)],
        [ModelTensor([name], value) for name, value in (*values.items(), *((name, None) for name in own_states))],
        kind=str,
    ).problems()
    for target in targets:
        for _, saved in target.stored:
            problems += _ties_and_order(saved, own[target.names[0]])
    return problems or list(_groups(manifest, holdings))


def model_misfits(manifest: Manifest, parameters: Sequence[ModelParameter]) -> list[str]:
    """The misfits of a model's parameters, a line for each: before there is an engine, and of a model without memory
    too."""
    targets = [ModelTensor(own.names, own.parameter) for own in parameters]
    return match(manifest.stored_weights(), targets, kind=any_kind).problems()


def _ties_and_order(saved: StoredTensor, own: ManagedParameter) -> Iterator[str]:
    name = own.names[0]
    if saved.names != own.names:
        yield f"{name} is tied as {saved.names}, and the model's as {own.names}"
    if memory_order(saved.shape, saved.stride) != memory_order(saved.shape, own.stride):
        yield (
            f"{name} lies in memory with strides {saved.stride}, and the model's with {own.stride}; build the model in "
            "that memory format"
        )


def _groups(manifest: Manifest, holdings: Holdings) -> Iterator[str]:
    groups, saved = holdings.groups, manifest.content["groups"]
    names = [group["name"] for group in groups.hyperparameters]
    saved_names = [group["hyperparameters"]["name"] for group in saved]
    kinds, saved_kinds = groups.kinds, [group["optimizer"] for group in saved]
    if saved_names[: len(names)] != names:
        yield f"its parameter groups are {saved_names}, and the engine's {names}; {_KEEP}"
    elif saved_kinds[: len(kinds)] != kinds:
        yield f"its optimizer is {', '.join(map(shown, saved_kinds))}, and the engine's {', '.join(kinds)}; {_KEEP}"
    else:
        for group, saved_group in zip(groups.hyperparameters, saved, strict=False):
            settings = saved_group["hyperparameters"]
            for name in hyperparameters.misfits(group, settings):
                value = shown(settings[name])
                yield f"{name} of group {group['name']!r} is {value}, of another kind than the engine's {group[name]}"
        for name, own in holdings.parameters.items():
            parameter = manifest.parameters[name]
            both_train = parameter.trains and groups.places[name][0]
            if both_train and parameter.is_updated_whole != own.is_updated_whole:
                how = "whole" if parameter.is_updated_whole else "by elements"
                yield f"{name} is updated {how} in it, and not in the engine"


def verified_manifest(path: str | os.PathLike[str], holdings: Holdings) -> tuple[Path, Manifest]:
    """The manifest of a checkpoint, once it fits the engine and its files are what was written: the ranks share out all
    blocks and read them. Collective.

    Raises:
        CheckpointError: on every rank, before anything has changed.
    """
    collectives, folder = holdings.collectives, Path(os.path.abspath(path))
    doing = f"loading {folder}"
    text = from_rank_0(collectives, lambda: read_manifest(folder).text(), doing=doing)
    manifest = parse_manifest(text, folder)

    def check() -> None:
        if read_manifest(folder).text() != text:
            raise CheckpointError(f"{folder} is another on this rank than on rank 0: all ranks must reach one folder")
        if problems := misfits(manifest, holdings):
            raise CheckpointError("\n".join(f"{folder} does not fit the engine: {problem}" for problem in problems))
        if problems := problems_in(folder, manifest, collectives.shards.rank, collectives.shards.size):
            raise CheckpointError("\n".join(problems))

    on_all(collectives, check, doing=doing, outcome=LEFT)
    return folder, manifest


def added_groups(manifest: Manifest, groups: ParamGroups) -> list[dict[str, Any]]:
    """The settings of groups beyond those of the engine."""
    added = []
    for group in manifest.content["groups"][len(groups.hyperparameters) :]:
        settings = without_objects(group["hyperparameters"])
        for name, value in settings.items():
            settings[name] = restored(value, deepcopy(groups.defaults.get(name)))
        added.append(settings)
    return added


def restore(folder: Path, manifest: Manifest, holdings: Holdings, *, averages: bool) -> None:
    """Give an engine the content of a verified checkpoint. Collective.

    Args:
        averages: whether the engine keeps an average of weights, and so takes the checkpoint's.

    Raises:
        CheckpointError: on every rank; a file has changed since it was verified.
    """
    with Reader(folder, manifest) as reader:
        source = Checkpoint(folder, manifest, holdings, reader)
        source.has_average = averages and manifest.num_average_updates > 0
        fill(source, holdings.buckets, holdings.collectives)
    for group, saved in zip(holdings.groups.hyperparameters, manifest.content["groups"], strict=True):
        restore_group(group, saved["hyperparameters"], saved["first_lr"])  # type: ignore[arg-type]


class Checkpoint(Source):
    """A checkpoint, checked for the engine: each rank reads its own ranges.

    Args:
        reader: of its files, open.
    """

    has_state = True

    def __init__(self, folder: Path, manifest: Manifest, holdings: Holdings, reader: Reader) -> None:
        self.doing = f"loading {folder}"
        self._manifest, self._holdings, self._reader = manifest, holdings, reader

    def read(self, piece: NamedPiece) -> None:
        saved = self._manifest.parameters[piece.managed.names[0]].tensors[piece.role]
        self._reader.read(saved, piece.in_tensor.start if piece.in_tensor else 0, piece.values)

    def keeps(self, managed: ManagedParameter) -> Keeps:
        """Values for all elements lie where torch's own `load_state_dict` has them: the number of steps on the host,
        unless an update on the device wants it there, and all others on the device."""
        saved, settings = self._manifest.parameters[managed.names[0]], self._holdings.groups.hyperparameters
        updates_there = any(settings[managed.group].get(name) for name in ("fused", "capturable"))
        values: dict[str, KeptTensor | KeptOnce] = {}
        for name, value in saved.counts.items():
            once = restored(value, None) if isinstance(value, dict) else value
            values[name] = KeptOnce(once, isinstance(once, torch.Tensor) and (name != "step" or updates_there))
        for role, tensor in saved.tensors.items():
            if role not in (WEIGHT, AVERAGE):
                values[role] = KeptTensor(tensor.shape if managed.is_updated_whole else None, tensor.torch_dtype)
        return values

    def fill_rest(self) -> None:
        """Fill buffers, and the extra state of modules. As many ranks as saved them get their own buffers; otherwise
        all get rank 0's."""
        shards, holdings = self._holdings.collectives.shards, self._holdings
        for name, values in buffers(holdings.model, holdings.buckets).items():
            saved = self._manifest.buffers[name]
            by_rank = {piece.file: piece for piece in saved.pieces}
            rank = shards.rank if self._manifest.num_ranks == shards.size and shards.rank in by_rank else 0
            if values.numel() > 0:
                target = torch.empty(values.numel(), dtype=values.dtype)
                self._reader.read(msgspec.structs.replace(saved, pieces=[by_rank[rank]]), 0, target)
                values.data.copy_(target.view(values.shape))
        restore_extra_states(holdings.model, self._manifest.extra_state, self._reader)
