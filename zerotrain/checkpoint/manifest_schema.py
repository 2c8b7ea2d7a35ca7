"""Which contents a manifest may have: types, and places that fit each other and the files.

A hash that fits says only that a manifest is as somebody wrote it. Whatever is read by it, as many bytes as it says and
where it says, is checked here first: afterwards no number of it leads out of a file, a tensor or the memory.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from math import prod
from typing import Annotated, Any, NotRequired, TypedDict

import torch
from msgspec import Meta

from zerotrain.checkpoint.blocks import BLOCK_NBYTES, HASH
from zerotrain.files.untrusted import FileName, Name, Natural, Shape, UntrustedFileError, one_of, require_kind, shown

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

_Dtype = Annotated[str, one_of(*DTYPES)]


class _ManifestPiece(TypedDict):
    file: Natural
    byte: Natural
    start: Natural
    stop: Natural


class _Tensor(TypedDict):
    dtype: _Dtype
    pieces: list[_ManifestPiece]
    shape: NotRequired[Shape]


class _Buffer(TypedDict):
    dtype: _Dtype
    pieces: list[_ManifestPiece]
    shape: Shape


class _Parameter(TypedDict):
    names: list[Name]
    shape: Shape
    stride: list[Natural]
    trains: bool
    group: int | None
    generation: Natural
    is_updated_whole: bool
    counts: dict[str, Any]
    tensors: dict[str, _Tensor]


class _Settings(TypedDict):
    name: Name
    lr: NotRequired[float | dict[str, Any]]


class _Group(TypedDict):
    optimizer: Name
    first_lr: float
    hyperparameters: dict[str, Any]


class _Scaler(TypedDict):
    scale: float
    num_clean_steps: Natural


class _Average(TypedDict):
    num_updates: Natural


class _File(TypedDict):
    name: FileName
    nbytes: Natural
    hashes: list[str]


class _Manifest(TypedDict):
    hash_function: Annotated[str, one_of(HASH)]
    block_nbytes: Annotated[int, Meta(ge=BLOCK_NBYTES, le=BLOCK_NBYTES)]
    versions: dict[str, Name]
    step: Natural
    skipped_in_a_row: Natural
    loss_scaler: _Scaler | None
    stage: Annotated[int, Meta(ge=0, le=3)]
    ranks: Natural
    virtual_ranks: Natural
    precision: Name
    config_sha256: str | None
    config: Any
    extra: Any
    own: NotRequired[list[Any]]
    groups: list[_Group]
    parameters: dict[str, _Parameter]
    buffers: dict[str, _Buffer]
    extra_state: NotRequired[dict[str, dict[str, Any]]]
    average: NotRequired[_Average | None]
    files: list[_File]


def _is_setting(value: Any) -> bool:
    """Whether a value is a hyperparameter, or what an optimizer keeps once: a number, a text, null, a tensor of few
    numbers, a list of these, or the name of an object's class."""
    if type(value) is list:
        return all(map(_is_setting, value))
    if type(value) is dict:
        return type(value.get("object")) is str or _is_tensor(value)
    return value is None or type(value) in (bool, int, float, str)


def _is_tensor(given: Mapping[str, Any]) -> bool:
    if type(dtype := given.get("dtype")) is not str or dtype not in DTYPES:
        return False
    try:
        torch.tensor(given.get("value"), dtype=DTYPES[dtype])
    except (TypeError, ValueError, RuntimeError, OverflowError):  # a text, lists of several lengths, 10**30
        return False
    return True


def require_whole(content: Any) -> None:
    """Make sure that a manifest can be read by.

    Raises:
        UntrustedFileError: it cannot; the text names the place.
    """
    require_kind(content, _Manifest)
    states = content.get("extra_state", {})
    for state in states.values():
        require_kind(state, dict[str, Any] if "value" in state else _Buffer)
    for name in (*content["buffers"], *states):
        require_kind(name, Name)
    groups = [each["hyperparameters"] for each in content["groups"]]
    for group in groups:
        lr = require_kind(group, _Settings).get("lr", 0.0)
        if isinstance(lr, dict) and not _is_tensor(lr):
            raise UntrustedFileError(f"lr: got {shown(lr)}; it must be a number")
    for settings in (*groups, *(each["counts"] for each in content["parameters"].values())):
        if bad := [name for name, value in settings.items() if not _is_setting(value)]:
            raise UntrustedFileError(
                f"{shown(bad[0])}: got {shown(settings[bad[0]])}; it must be a number, a text, null, a tensor, a list "
                "of these, or an object's class"
            )
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
            require_kind(role, Name)
            own = "shape" in tensor
            if own != (parameter["is_updated_whole"] and role not in (WEIGHT, AVERAGE)):
                raise UntrustedFileError(f"{role} of {shown(name)} has {'a' if own else 'no'} shape of its own")
            yield f"{role} of {shown(name)}", prod(tensor["shape"]) if own else numel, tensor, False
    for name, buffer in content["buffers"].items():
        yield f"buffer {shown(name)}", prod(buffer["shape"]), buffer, True
    for name, state in content.get("extra_state", {}).items():
        if "pieces" in state:
            yield f"extra state {shown(name)}", prod(state["shape"]), state, False
