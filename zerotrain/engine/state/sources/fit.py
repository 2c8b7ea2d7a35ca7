"""The check that a checkpoint is one of this model and this optimizer; placement, precision, buckets may be others."""

from collections.abc import Collection, Iterator, Sequence
from typing import Any

from zerotrain.checkpoint.manifest import EXTRA_STATE, Manifest
from zerotrain.engine.groups import hyperparameters
from zerotrain.engine.state.extra_state import modules_with_extra_state
from zerotrain.engine.state.owned import Holdings, buffers
from zerotrain.errors import listed
from zerotrain.files.untrusted import shown
from zerotrain.sharding.units import ManagedParameter, ModelParameter

MAX_NAMES_SHOWN = 3


def misfits(manifest: Manifest, holdings: Holdings) -> list[str]:
    """Tell what does not fit, a line for each; the same on every rank, and nothing is changed."""
    own = holdings.parameters
    own_buffers = buffers(holdings.model, holdings.buckets)
    own_states = [name for name, _ in modules_with_extra_state(holdings.model)]
    saved_states = manifest.content.get(EXTRA_STATE, own_states)  # of an older checkpoint, without any: they stay
    problems = [
        *_names(manifest.parameters, own, "parameter"),
        *_names(manifest.buffers, own_buffers, "buffer"),
        *_names(saved_states, own_states, "extra state"),
    ]
    for name in (name for name in own if name in manifest.parameters):
        problems += _of_parameter(manifest.parameters[name], own[name])
    for name in (name for name in own_buffers if name in manifest.buffers):
        saved, values = manifest.buffers[name], own_buffers[name]
        kinds = [list(values.shape), str(values.dtype).removeprefix("torch.")]
        if [saved["shape"], saved["dtype"]] != kinds:
            problems.append(
                f"buffer {name} is {saved['dtype']} {saved['shape']}, and the model's {kinds[1]} {kinds[0]}"
            )
    return problems + ([] if problems else list(_groups(manifest, holdings)))


def model_misfits(manifest: Manifest, parameters: Sequence[ModelParameter]) -> list[str]:
    """Tell what of a model does not fit, a line for each, as far as its parameters show: before there is an engine, and
    of a model without memory too."""
    own = {each.names[0]: each for each in parameters}
    common = [(manifest.parameters[name], each) for name, each in own.items() if name in manifest.parameters]
    shapes = [problem for saved, each in common for problem in _shape(saved, each)]
    if len(shapes) > MAX_NAMES_SHOWN:
        shapes[MAX_NAMES_SHOWN:] = [f"and {len(shapes) - MAX_NAMES_SHOWN} more are of other shapes"]
    return [*_names(manifest.parameters, own, "parameter"), *shapes]


def _names(saved: Collection[str], own: Collection[str], kind: str) -> Iterator[str]:
    missing = [name for name in own if name not in saved]
    surplus = [name for name in saved if name not in own]
    if missing:
        yield f"{_listed(missing, kind)} of the model missing in it"
    if surplus:
        yield f"it has {_listed(surplus, kind, verb=False)} that the model has not"


def _of_parameter(saved: dict[str, Any], own: ManagedParameter) -> Iterator[str]:
    name, shape = own.names[0], list(own.parameter.shape)
    if saved["names"] != own.names:
        yield f"{name} is tied as {saved['names']}, and the model's as {own.names}"
    if saved["shape"] != shape:
        yield from _shape(saved, own)
    elif memory_order(shape, saved["stride"]) != memory_order(shape, own.stride):
        yield (
            f"{name} lies in memory with strides {tuple(saved['stride'])}, and the model's with {own.stride}; build "
            "the model in that memory format"
        )


def _shape(saved: dict[str, Any], own: ModelParameter) -> Iterator[str]:
    if saved["shape"] != list(own.parameter.shape):
        yield (
            f"{own.names[0]} is of shape {tuple(saved['shape'])}, and the model's of shape {tuple(own.parameter.shape)}"
        )


def memory_order(shape: Sequence[int], stride: Sequence[int]) -> list[int]:
    """The dimensions that have a length, from the slowest to the fastest."""
    dims = [dim for dim, size in enumerate(shape) if size > 1]
    return sorted(dims, key=lambda dim: -stride[dim])


def _groups(manifest: Manifest, holdings: Holdings) -> Iterator[str]:
    groups, saved = holdings.groups, manifest.content["groups"]
    names = [group["name"] for group in groups.hyperparameters]
    saved_names = [group["hyperparameters"]["name"] for group in saved]
    kinds, saved_kinds = groups.kinds, [group["optimizer"] for group in saved]
    if saved_names[: len(names)] != names:
        yield f"its parameter groups are {saved_names}, and the engine's {names}"
    elif saved_kinds[: len(kinds)] != kinds:
        yield f"its optimizer is {', '.join(map(shown, saved_kinds))}, and the engine's {', '.join(kinds)}"
    else:
        for group, settings in zip(groups.hyperparameters, (each["hyperparameters"] for each in saved), strict=False):
            for name in hyperparameters.misfits(group, settings):
                value = shown(settings[name])
                yield f"{name} of group {group['name']!r} is {value}, of another kind than the engine's {group[name]}"
        for name, own in holdings.parameters.items():
            parameter = manifest.parameters[name]
            both_train = parameter["trains"] and groups.places[name][0]
            if both_train and parameter["is_updated_whole"] != own.is_updated_whole:
                how = "whole" if parameter["is_updated_whole"] else "by elements"
                yield f"{name} is updated {how} in it, and not in the engine"


def _listed(names: Sequence[str], kind: str, *, verb: bool = True) -> str:
    are = (" is" if len(names) == 1 else " are") if verb else ""
    return f"{kind}{'s' * (len(names) > 1)} {listed(names, MAX_NAMES_SHOWN)}{are}"
