"""An engine into a checkpoint: what each rank writes is planned together, and then a thread of each writes it."""

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from zerotrain.checkpoint.folder import PartialFolder, file_name
from zerotrain.checkpoint.manifest import BUFFER, DTYPES, EXTRA_STATE, FORMAT, Manifest, hash_of, head
from zerotrain.checkpoint.tensor_file import Entry, TensorFile, chunks
from zerotrain.engine.buckets.bucket import Bucket
from zerotrain.engine.groups.hyperparameters import saved_group
from zerotrain.engine.state.extra_state import described, entries_of, extra_states
from zerotrain.engine.state.owned import Holdings, buffers, counts, entries, saved_parameters
from zerotrain.engine.state.saving.chunks import ChunkReader
from zerotrain.engine.state.saving.snapshot import Snapshot
from zerotrain.engine.state.saving.writing import LEFT, Writing
from zerotrain.engine.state.together import attempt, exchange, raise_first
from zerotrain.errors import ConfigError, EngineStateError
from zerotrain.files.untrusted import MAX_DEPTH

MAX_NESTED = MAX_DEPTH - 14
"""Dicts and lists in each other that a save takes: a manifest has more around them, and is read up to `MAX_DEPTH`."""


@dataclass(frozen=True, kw_only=True)
class Given:
    """The arguments of a save."""

    path: str | os.PathLike[str]
    extra: Any
    config: Any
    own: Any
    staging_nbytes: int | None
    progress: Mapping[str, Any]
    """"step", and what else the engine counts; values for JSON."""

    @property
    def target(self) -> Path:
        """The folder, absolute."""
        return Path(os.path.abspath(self.path))


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """A rank's part in a save, as found out without communication."""

    partial: PartialFolder | None
    """On rank 0."""
    own: dict[Bucket, list[Entry]]
    """The entries that this rank writes, without buffers."""
    buffers: dict[str, torch.Tensor]
    """The model's, by name."""
    extra_states: dict[str, Any]
    """Extra state of modules, by name; rank 0's is saved."""
    told: dict[str, Any]
    """For all ranks."""


def prepare(given: Given, holdings: Holdings, settle_former: Callable[[], None]) -> Writing:
    """All of a save but the writing. Collective.

    Args:
        settle_former: waits for the save before this one, and raises its error if nobody has read it.
    """
    collectives, doing = holdings.collectives, f"saving {given.target}"

    def make_plan() -> _Plan:
        settle_former()
        return _planned(given, holdings)

    writing: Writing | None = None
    plan, error = attempt(make_plan)
    try:
        told = exchange(collectives, None if plan is None else plan.told, error, doing=doing, left=LEFT)
        assert plan is not None
        writing, error = attempt(lambda: _writing(given, holdings, plan, told))
        raise_first(collectives, error, doing=doing, left=LEFT)
        assert writing is not None
    except BaseException:
        if writing is not None:
            writing.snapshot.close()
        if plan is not None and plan.partial is not None:
            plan.partial.remove()
        raise
    return writing


def facts_of(given: Given) -> dict[str, object]:
    """Arguments that must be equal on all ranks, by name.

    Raises:
        ConfigError: something of it cannot be saved.
    """
    for name, value in (("extra", given.extra), ("config", given.config), ("own", given.own)):
        require_plain(value, name)
    if given.staging_nbytes is not None and given.staging_nbytes < 0:
        raise ConfigError(f"engine.begin_save: staging_nbytes is {given.staging_nbytes}; give 0 or more bytes")
    extra, config = (json.dumps(value, sort_keys=True) for value in (given.extra, given.config))
    return {"path": given.target, "extra": extra, "config": config}


def _planned(given: Given, holdings: Holdings) -> _Plan:
    rank = holdings.collectives.shards.rank
    found, states = buffers(holdings.model, holdings.buckets), extra_states(holdings.model)
    for name, state in states.items():
        if not isinstance(state, torch.Tensor):
            require_plain(state, name)
    _require_known(holdings, {**found, **states})
    own: dict[Bucket, list[Entry]] = {}
    for bucket, entry in entries(holdings, rank):
        own.setdefault(bucket, []).append(entry)
    told = {
        "own": given.own,
        "buffers": {name: _hash_of_tensor(each) for name, each in found.items()},
        "counts": counts(holdings),  # raises where something cannot be saved, before a folder is made
    }
    partial = PartialFolder(given.target) if rank == 0 else None
    if partial is not None:
        told |= {"token": partial.token, "folder": str(partial.path)}
    return _Plan(partial=partial, own=own, buffers=found, extra_states=states, told=told)


def _require_known(holdings: Holdings, beside: Mapping[str, Any]) -> None:
    """Make sure that a checkpoint may hold these names and dtypes: what cannot be read again is not saved.

    Raises:
        EngineStateError: one of them it may not.
    """
    groups = [str(group["name"]) for group in holdings.groups.hyperparameters]
    for name in (*beside, *groups, *(name for each in holdings.parameters.values() for name in each.names)):
        if not name.isprintable():
            raise EngineStateError(f"{name!r} is the name of a tensor or group, and must be printable to be saved")
    for name, value in beside.items():
        if isinstance(value, torch.Tensor) and value.dtype not in DTYPES.values():
            raise EngineStateError(f"{name} is of {value.dtype}, and what is saved may be of {', '.join(DTYPES)}")


def _writing(given: Given, holdings: Holdings, plan: _Plan, told: list[dict[str, Any]]) -> Writing:
    """The job of the thread that writes, from here on."""
    shards = holdings.collectives.shards
    content = _content(given, holdings, plan, told) if plan.partial is not None else {}
    partial = plan.partial

    def publish(files: list[dict[str, Any]]) -> None:
        assert partial is not None
        _add_files(content, files)
        partial.publish(Manifest(content))

    return Writing(
        path=given.target,
        folder=Path(told[0]["folder"]),
        file=_file(given, plan, told, shards.rank),
        snapshot=Snapshot(plan.own, given.staging_nbytes, ChunkReader(holdings.collectives.world.device)),
        notes=holdings.collectives.notes(f"save/{told[0]['token']}"),
        rank=shards.rank,
        num_ranks=shards.size,
        publish=publish,
        remove=partial.remove if partial is not None else _nothing,
    )


def _nothing() -> None:
    pass


def _hash_of_tensor(values: torch.Tensor) -> str:
    return hash_of("".join(hash_of(chunk) for chunk in chunks(values)).encode())


def _file(given: Given, plan: _Plan, told: Sequence[dict[str, Any]], rank: int) -> TensorFile:
    """This rank's file. Rank 0 saves all buffers, any other those that differ from them: batch norms of other data."""
    own = [entry for of_bucket in plan.own.values() for entry in of_bucket]
    own += [
        Entry(name, BUFFER, values.detach().reshape(-1).clone(), 0)  # the next forward may change it
        for name, values in plan.buffers.items()
        if rank == 0 or told[rank]["buffers"][name] != told[0]["buffers"][name]
    ]
    own += entries_of(plan.extra_states) if rank == 0 else []
    about = {"format": FORMAT, "save": told[0]["token"], "step": str(given.progress["step"]), "rank": str(rank)}
    return TensorFile(file_name(rank), own, about)


def _content(given: Given, holdings: Holdings, plan: _Plan, told: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The manifest but for its files and where each tensor lies in them: as the state is now."""
    options, config = holdings.options, given.config
    groups = zip(holdings.groups.hyperparameters, holdings.groups.kinds, strict=True)
    kept: dict[str, Any] = {}
    for each in told:
        kept |= each["counts"]
    content = {
        **head(),
        "save": told[0]["token"],
        **given.progress,
        "stage": options.zero.stage,
        "ranks": len(told),
        "virtual_ranks": len(told) * options.leaves_per_rank,
        "precision": options.given.precision.name,
        "config": config,
        "config_sha256": None if config is None else hashlib.sha256(json.dumps(config).encode()).hexdigest(),
        "extra": given.extra,
        "own": [each["own"] for each in told],
        "groups": [_group(group, kind) for group, kind in groups],
        "parameters": saved_parameters(holdings, kept),
        "buffers": {
            name: {"shape": list(values.shape), "dtype": str(values.dtype).removeprefix("torch."), "pieces": []}
            for name, values in plan.buffers.items()
        },
        EXTRA_STATE: described(plan.extra_states),
        "files": [],
    }
    # A copy: the training changes what some of this refers to, such as the names of parameters and what `extra` holds.
    copied: dict[str, Any] = json.loads(json.dumps(content))
    return copied


def _add_files(content: dict[str, Any], files: Sequence[dict[str, Any]]) -> None:
    """Complete a manifest by what each rank tells of its file."""
    parameters, beside = content["parameters"], {BUFFER: content["buffers"], EXTRA_STATE: content[EXTRA_STATE]}
    for index, file in enumerate(files):
        for piece in file.pop("pieces"):
            place = {"file": index, "byte": piece["byte"], "start": piece["start"], "stop": piece["stop"]}
            if (found := beside.get(piece["role"], {}).get(piece["name"])) is not None:
                found["pieces"].append(place)
                continue
            tensors = parameters[piece["name"]]["tensors"]
            tensor = tensors.setdefault(piece["role"], {"dtype": piece["dtype"], "pieces": []})
            if piece["kept_shape"] is not None:
                tensor["shape"] = piece["kept_shape"]
            tensor["pieces"].append(place)
        content["files"].append(file)


def _group(group: Mapping[str, Any], kind: str) -> dict[str, Any]:
    return {"optimizer": kind, "first_lr": float(group["initial_lr"]), "hyperparameters": saved_group(group)}


def require_plain(value: Any, where: str, depth: int = 0) -> None:
    """Make sure that a value comes out of JSON as it went in.

    Raises:
        ConfigError: naming the part that does not.
    """
    if depth > MAX_NESTED:
        raise ConfigError(
            f"engine.save: {where[:60]}... lies in more than {MAX_NESTED} dicts and lists; save it flatter"
        )
    if isinstance(value, dict):
        for key, each in value.items():
            if type(key) is not str:
                raise ConfigError(f"engine.save: {where} has the key {key!r}; keys must be texts")
            require_plain(each, f"{where}[{key!r}]", depth + 1)
    elif type(value) is list:
        for index, each in enumerate(value):
            require_plain(each, f"{where}[{index}]", depth + 1)
    elif value is not None and type(value) not in (bool, int, float, str):
        raise ConfigError(
            f"engine.save: {where} is of type {type(value).__name__}; it may hold dicts with texts as keys, lists, "
            "numbers, texts, True, False and None: give a tensor or tuple as a list"
        )
