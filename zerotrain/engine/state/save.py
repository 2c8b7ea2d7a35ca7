"""An engine into a checkpoint: every rank writes its file, rank 0 the manifest, and then it has its name."""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from zerotrain.checkpoint.blocks import hash_of
from zerotrain.checkpoint.folder import PartialFolder, file_name
from zerotrain.checkpoint.manifest import Manifest, head
from zerotrain.checkpoint.tensor_file import Entry, TensorFile, chunks
from zerotrain.comm.collectives import Collectives
from zerotrain.engine.groups.hyperparameters import saved_group
from zerotrain.engine.state.owned import BUFFER, Holdings, buffers, counts, entries, saved_parameters
from zerotrain.engine.state.together import attempt, raise_first
from zerotrain.errors import ConfigError

LEFT = "nothing was saved, what was there before is as it was, and training can go on"


def save(
    path: str | os.PathLike[str], holdings: Holdings, progress: Mapping[str, Any], *, extra: Any, config: Any
) -> Path:
    """See `ZeroEngine.save`.

    Args:
        progress: "step", and what else the engine counts; values for JSON.
    """
    collectives = holdings.collectives
    target = Path(os.path.abspath(path))
    doing = f"saving {target}"
    planned, error = attempt(lambda: _prepared(target, holdings, extra, config))
    try:
        raise_first(collectives, error, doing=doing, left=LEFT)
        assert planned is not None
        partial, own, facts = planned
        told = collectives.gather_objects(
            [partial.token if partial else None, str(partial.path) if partial else None, facts], name=doing
        )
        _, error = attempt(lambda: _require_same([facts for _, _, facts in told]))
        raise_first(collectives, error, doing=doing, left=LEFT)
        token, folder = told[0][:2]
        file = _file(holdings, own, [facts["buffers"] for _, _, facts in told], token, progress)
        _write(file, Path(folder), collectives, doing)
        described = collectives.gather_objects([file.described(), counts(holdings)], name=doing)

        def publish() -> None:
            if partial is not None:
                content = _content(holdings, described, token, progress, extra=extra, config=config)
                partial.publish(Manifest(content))

        _, error = attempt(publish)
        raise_first(collectives, error, doing=doing, left=LEFT)
    except BaseException:
        if planned is not None and planned[0] is not None:
            planned[0].remove()
        raise
    return target


def _prepared(
    target: Path, holdings: Holdings, extra: Any, config: Any
) -> tuple[PartialFolder | None, list[Entry], dict[str, Any]]:
    """The folder (on rank 0), what this rank writes without its buffers, and what all ranks are told of it."""
    rank = holdings.collectives.shards.rank
    for name, value in (("extra", extra), ("config", config)):
        require_plain(value, name)
    facts = {
        "target": str(target),
        "extra": hash_of(json.dumps(extra, sort_keys=True).encode()),
        "config": hash_of(json.dumps(config, sort_keys=True).encode()),
        "buffers": {name: _hash_of_tensor(each) for name, each in buffers(holdings.model, holdings.buckets).items()},
    }
    own = list(entries(holdings, rank))
    counts(holdings)  # raises where something cannot be saved, before a folder is made
    return (PartialFolder(target) if rank == 0 else None), own, facts


def _hash_of_tensor(values: torch.Tensor) -> str:
    return hash_of("".join(hash_of(chunk) for chunk in chunks(values)).encode())


def _require_same(facts: list[dict[str, Any]]) -> None:
    for name in ("target", "extra", "config"):
        different = [rank for rank, each in enumerate(facts) if each[name] != facts[0][name]]
        if different:
            raise ConfigError(
                f"engine.save: {'path' if name == 'target' else name} is another on rank {different[0]} than on rank "
                "0; give all ranks the same"
            )


def _file(
    holdings: Holdings, own: list[Entry], hashes: list[dict[str, str]], token: str, progress: Mapping[str, Any]
) -> TensorFile:
    """This rank's file. Rank 0 saves all buffers, any other those that differ from them: batch norms of other data."""
    rank = holdings.collectives.shards.rank
    own = own + [
        Entry(name, BUFFER, values.reshape(-1), 0)
        for name, values in buffers(holdings.model, holdings.buckets).items()
        if rank == 0 or hashes[rank][name] != hashes[0][name]
    ]
    about = {"format": "zerotrain checkpoint", "save": token, "step": str(progress["step"]), "rank": str(rank)}
    return TensorFile(file_name(rank), own, about)


def _write(file: TensorFile, folder: Path, collectives: Collectives, doing: str) -> None:
    """Write this rank's file, and after each some MiB learn how the others are doing: the first that fails ends it for
    all. Collective."""
    device = collectives.world.device
    mine = torch.tensor([file.num_rounds], dtype=torch.int64, device=device)
    num_rounds = 1 + int(collectives.gather_small(mine, name=doing).max())
    writing: Iterator[None] = file.write(folder)
    error: Exception | None = None
    try:
        for _ in range(num_rounds):
            _, error = attempt(lambda: next(writing, None))
            failed = torch.tensor([int(error is not None)], dtype=torch.int64, device=device)
            if collectives.gather_small(failed, name=doing).any():
                break
    finally:
        writing.close()  # type: ignore[attr-defined]
    raise_first(collectives, error, doing=doing, left=LEFT)


def _content(
    holdings: Holdings,
    described: list[list[Any]],
    token: str,
    progress: Mapping[str, Any],
    *,
    extra: Any,
    config: Any,
) -> dict[str, Any]:
    """The manifest, from what each rank has told of its file and of what its optimizers count."""
    groups = holdings.groups.hyperparameters
    options = holdings.options
    kept: dict[str, Any] = {}
    for _, of_rank in described:
        kept |= of_rank
    parameters = saved_parameters(holdings, kept)
    saved_buffers: dict[str, Any] = {
        name: {"shape": list(values.shape), "dtype": str(values.dtype).removeprefix("torch."), "pieces": []}
        for name, values in buffers(holdings.model, holdings.buckets).items()
    }
    files = []
    for index, (file, _) in enumerate(described):
        for piece in file.pop("pieces"):
            place = {"file": index, "byte": piece["byte"], "start": piece["start"], "stop": piece["stop"]}
            if piece["role"] == BUFFER and piece["name"] in saved_buffers:
                saved_buffers[piece["name"]]["pieces"].append(place)
                continue
            tensors = parameters[piece["name"]]["tensors"]
            tensor = tensors.setdefault(piece["role"], {"dtype": piece["dtype"], "pieces": []})
            if piece["kept_shape"] is not None:
                tensor["shape"] = piece["kept_shape"]
            tensor["pieces"].append(place)
        files.append(file)
    return {
        **head(),
        "save": token,
        **progress,
        "stage": options.zero.stage,
        "ranks": len(described),
        "virtual_ranks": len(described) * options.leaves_per_rank,
        "precision": options.given.precision.name,
        "config": config,
        "config_sha256": None if config is None else hashlib.sha256(json.dumps(config).encode()).hexdigest(),
        "extra": extra,
        "groups": [_group(group, kind) for group, kind in zip(groups, holdings.groups.kinds, strict=True)],
        "parameters": parameters,
        "buffers": saved_buffers,
        "files": files,
    }


def _group(group: Mapping[str, Any], kind: str) -> dict[str, Any]:
    return {"optimizer": kind, "first_lr": float(group["initial_lr"]), "hyperparameters": saved_group(group)}


def require_plain(value: Any, where: str) -> None:
    """Make sure that a value comes out of JSON as it went in.

    Raises:
        ConfigError: naming the part that does not.
    """
    if isinstance(value, dict):
        for key, each in value.items():
            if type(key) is not str:
                raise ConfigError(f"engine.save: {where} has the key {key!r}; keys must be texts")
            require_plain(each, f"{where}[{key!r}]")
    elif type(value) is list:
        for index, each in enumerate(value):
            require_plain(each, f"{where}[{index}]")
    elif value is not None and type(value) not in (bool, int, float, str):
        raise ConfigError(
            f"engine.save: {where} is of type {type(value).__name__}; it may hold dicts with texts as keys, lists, "
            "numbers, texts, True, False and None: give a tensor or tuple as a list"
        )
