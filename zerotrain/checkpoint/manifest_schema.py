"""Which contents a manifest may have: types, and places that fit each other and the files.

A hash that fits says only that a manifest is as somebody wrote it. Whatever is read by it, as many bytes as it says and
where it says, is checked here first: afterwards no number of it leads out of a file, a tensor or the memory.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Any

import torch

from zerotrain.checkpoint.blocks import BLOCK_NBYTES, HASH
from zerotrain.files.untrusted import (
    MAX_INT,
    Check,
    Each,
    FileName,
    Natural,
    OneOf,
    Optional,
    Shape,
    UntrustedFileError,
    require_schema,
    shown,
)

DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name)
    for name in (
        "float64", "float32", "float16", "bfloat16", "complex128", "complex64", "complex32", "bool", "int64", "int32",
        "int16", "int8", "uint64", "uint32", "uint16", "uint8", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz",
        "float8_e5m2fnuz", "float8_e8m0fnu",
    )
}  # fmt: skip
"""By what the manifest calls them."""
PLACES = ("file", "byte", "start", "stop")
WEIGHT = "weight"
AVERAGE = "weight_average"
"""The role of the moving average of a weight, which the parameters that train have if the run keeps one."""


_NAME = Check(lambda value: isinstance(value, str) and value.isprintable(), "a printable name")
"""Checks the name of a parameter, buffer and the like, which messages show."""


def _are_pieces(value: Any) -> bool:
    """Whether a value says where the elements of a tensor lie. There are many: no schema is as fast."""
    return type(value) is list and all(
        type(each) is dict and all(type(each.get(name)) is int and 0 <= each[name] <= MAX_INT for name in PLACES)
        for each in value
    )


@dataclass(frozen=True)
class _Setting:
    """A hyperparameter, or what an optimizer keeps once: a number, a text, null, a tensor of few numbers, a list of
    these, or the name of an object's class."""

    def problem(self, value: Any) -> str | None:
        if value is None or type(value) in (bool, int, float, str):
            return None
        if type(value) is list:
            return next(filter(None, map(self.problem, value)), None)
        if type(value) is dict and (type(value.get("object")) is str or _is_tensor(value)):
            return None
        return "a number, a text, null, a tensor, a list of these, or an object's class"


def _is_tensor(given: Mapping[str, Any]) -> bool:
    if type(dtype := given.get("dtype")) is not str or dtype not in DTYPES:
        return False
    try:
        torch.tensor(given.get("value"), dtype=DTYPES[dtype])
    except (TypeError, ValueError, RuntimeError, OverflowError):  # a text, lists of several lengths, 10**30
        return False
    return True


_TENSOR = {
    "dtype": OneOf(DTYPES),
    "pieces": Check(_are_pieces, f"a list of pieces, each with whole numbers as {', '.join(PLACES)}"),
    "shape": Optional(Shape()),
}
_BUFFER = {**_TENSOR, "shape": Shape()}
_RATE = Check(
    lambda value: type(value) in (int, float) or (type(value) is dict and _is_tensor(value)),
    "a number",
)
"""A learning rate."""
_PARAMETER = {
    "names": [_NAME], "shape": Shape(), "stride": [Natural()], "trains": bool, "group": (int, None),
    "generation": Natural(), "is_updated_whole": bool, "counts": Each(_Setting()), "tensors": Each(_TENSOR),
}  # fmt: skip
_GROUP = {"optimizer": _NAME, "first_lr": float, "hyperparameters": Each(_Setting())}
_SCHEMA = {
    "hash_function": OneOf((HASH,)), "block_nbytes": OneOf((BLOCK_NBYTES,)), "versions": Each(_NAME),
    "step": Natural(), "skipped_in_a_row": Natural(), "loss_scaler": (dict, None), "stage": Natural(3),
    "ranks": Natural(), "virtual_ranks": Natural(), "precision": _NAME, "config_sha256": (str, None),
    "config": object, "extra": object, "own": Optional(list), "groups": [_GROUP], "parameters": Each(_PARAMETER),
    "buffers": Each(_BUFFER), "extra_state": Optional(Each(dict)),
    "average": Optional((dict, None)),
    "files": [{"name": FileName(), "nbytes": Natural(), "hashes": [str]}],
}  # fmt: skip
_SCALER = {"scale": float, "num_clean_steps": Natural()}
_AVERAGE = {"num_updates": Natural()}


def require_whole(content: Any) -> None:
    """Make sure that a manifest can be read by.

    Raises:
        UntrustedFileError: it cannot; the text names the place.
    """
    require_schema(content, _SCHEMA)
    if content["loss_scaler"] is not None:
        require_schema(content["loss_scaler"], _SCALER)
    if content.get("average") is not None:
        require_schema(content["average"], _AVERAGE)
    for settings in (each["hyperparameters"] for each in content["groups"]):
        require_schema(settings, {"name": _NAME, "lr": Optional(_RATE)})
    for name, state in content.get("extra_state", {}).items():
        require_schema(state, {"value": object} if "value" in state else _BUFFER)
        require_schema(name, _NAME)
    for problem in (*_of_files(content), *_of_parameters(content), *_of_places(content)):
        raise UntrustedFileError(problem)


def _of_files(content: Mapping[str, Any]) -> Iterator[str]:
    files, num_ranks = content["files"], content["ranks"]
    if len(files) != num_ranks or len({each["name"] for each in files}) != num_ranks or num_ranks == 0:
        yield f"it names {len(files)} files, and must name another for each of {num_ranks} ranks, 1 or more"
    for each in files:
        if len(each["hashes"]) != -(-each["nbytes"] // BLOCK_NBYTES):
            yield f"{each['name']} has {each['nbytes']} bytes in it, and the hashes of {len(each['hashes'])} blocks"


def _of_parameters(content: Mapping[str, Any]) -> Iterator[str]:
    seen: set[str] = set()
    for name, each in content["parameters"].items():
        shape, stride, group = each["shape"], each["stride"], each["group"]
        if each["names"][:1] != [name] or len(set(each["names"])) < len(each["names"]) or seen & {*each["names"]}:
            yield f"parameters.{shown(name)} has the names {shown(each['names'])}, another's or twice the same"
        seen.update(each["names"])
        if len(stride) != len(shape) or not is_dense(shape, stride):
            yield f"parameters.{shown(name)} has shape {shown(shape)} and strides {shown(stride)}, which leave gaps"
        if group is not None and not 0 <= group < len(content["groups"]):
            yield f"parameters.{shown(name)} is of group {group}, and there are {len(content['groups'])}"
        if group is None and each["trains"]:
            yield f"parameters.{shown(name)} trains, and is of no group"
    for name in content["buffers"]:
        require_schema(name, _NAME)


def is_dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether the elements of a tensor with these strides fill as many places, without gaps."""
    numel = 1
    for size, step in sorted(zip(shape, stride, strict=True), key=lambda each: each[1]):
        if size > 1 and step != numel:
            return False
        numel *= max(1, size)
    return True


def _of_places(content: Mapping[str, Any]) -> Iterator[str]:
    """That the pieces of each tensor lie in files, no two over each other, and have each of its elements once."""
    sizes, taken = [each["nbytes"] for each in content["files"]], []
    for label, numel, tensor, is_of_each_rank in _tensors(content):
        itemsize, done, pieces = DTYPES[tensor["dtype"]].itemsize, 0, tensor["pieces"]
        for piece in sorted(pieces, key=lambda each: each["start"]):
            file, byte, start, stop = (piece[name] for name in PLACES)
            end = byte + (stop - start) * itemsize
            if start > stop or file >= len(sizes) or end > sizes[file]:
                yield f"{label} has elements {start} to {stop} at byte {byte} of file {file}, where they cannot lie"
                return
            taken.append((file, byte, end, label))
            if is_of_each_rank and (start, stop) != (0, numel):
                yield f"{label} has elements {start} to {stop} of {numel} on rank {file}, and must have all"
            if not is_of_each_rank and start != done:
                yield f"{label} has element {min(start, done)} in no file, or in two places"
            done = stop
        if is_of_each_rank and pieces:
            files = [piece["file"] for piece in pieces]
            done = numel if 0 in files and len(set(files)) == len(files) else -1
        if done != numel:
            yield f"{label} must have {numel} elements, and {max(done, 0)} are in the files"
    taken.sort()
    for (file, _, end, label), (other_file, byte, _, other) in pairwise(taken):
        if file == other_file and byte < end:
            yield f"{label} and {other} lie in the same bytes of file {file}"


def _tensors(content: Mapping[str, Any]) -> Iterator[tuple[str, int, dict[str, Any], bool]]:
    """(label, number of elements, tensor, whether each rank has one of its own) of all that is saved."""
    has_average = bool((content.get("average") or {}).get("num_updates"))
    for name, parameter in content["parameters"].items():
        numel, tensors = prod(parameter["shape"]), parameter["tensors"]
        for role in (WEIGHT, AVERAGE) if has_average and parameter["trains"] else (WEIGHT,):
            if numel > 0 and (role not in tensors or not DTYPES[tensors[role]["dtype"]].is_floating_point):
                raise UntrustedFileError(f"parameters.{shown(name)} has no {role} of floating-point numbers")
        for role, tensor in tensors.items():
            require_schema(role, _NAME)
            own = "shape" in tensor
            if own != (parameter["is_updated_whole"] and role not in (WEIGHT, AVERAGE)):
                raise UntrustedFileError(f"{role} of {shown(name)} has {'a' if own else 'no'} shape of its own")
            yield f"{role} of {shown(name)}", prod(tensor["shape"]) if own else numel, tensor, False
    for name, buffer in content["buffers"].items():
        yield f"buffer {shown(name)}", prod(buffer["shape"]), buffer, True
    for name, state in content.get("extra_state", {}).items():
        if "pieces" in state:
            yield f"extra state {shown(name)}", prod(state["shape"]), state, False
