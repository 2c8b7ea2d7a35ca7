"""A checkpoint into an engine, whatever placement wrote it: all is checked before anything changes, and each rank reads
the elements that it holds."""

import os
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch

from zerotrain.checkpoint.manifest import (
    EXTRA_STATE,
    MANIFEST,
    WEIGHT,
    Manifest,
    dtype_of,
    parse_manifest,
    read_manifest,
)
from zerotrain.checkpoint.reading import Reader
from zerotrain.checkpoint.verify import problems_in
from zerotrain.engine.buckets.bucket import Bucket, TrainedBucket
from zerotrain.engine.groups.hyperparameters import restore_group, restored, without_objects
from zerotrain.engine.groups.param_groups import ParamGroups
from zerotrain.engine.state.extra_state import restore_extra_states
from zerotrain.engine.state.fit import misfits
from zerotrain.engine.state.named import pieces, replaced_weights, roles
from zerotrain.engine.state.owned import Holdings, buffers
from zerotrain.engine.state.together import attempt, raise_first
from zerotrain.errors import CheckpointError

NOTHING_CHANGED = "nothing of the engine has changed"
HALF = "the engine holds a part of it: load one that can be read before you train on"


def verified_manifest(path: str | os.PathLike[str], holdings: Holdings) -> tuple[Path, Manifest]:
    """The manifest of a checkpoint that fits the engine and whose files are what was written: the ranks have shared
    them out and read each block. Collective.

    Raises:
        CheckpointError: on every rank, before anything has changed.
    """
    collectives, folder = holdings.collectives, Path(os.path.abspath(path))
    doing = f"loading {folder}"
    text, error = attempt(lambda: read_manifest(folder).text() if collectives.shards.rank == 0 else None)
    raise_first(collectives, error, doing=doing, left=NOTHING_CHANGED)
    text = collectives.gather_objects(text, name=doing)[0]
    assert text is not None
    manifest = parse_manifest(text, folder / MANIFEST)

    def check() -> None:
        if read_manifest(folder).text() != text:
            raise CheckpointError(f"{folder} is another on this rank than on rank 0: all ranks must reach one folder")
        if problems := misfits(manifest, holdings):
            raise CheckpointError("\n".join(f"{folder} does not fit the engine: {each}" for each in problems))
        if problems := problems_in(folder, manifest, collectives.shards.rank, collectives.shards.size):
            raise CheckpointError("\n".join(problems))

    _, error = attempt(check)
    raise_first(collectives, error, doing=doing, left=NOTHING_CHANGED)
    return folder, manifest


def places_in(manifest: Manifest) -> dict[str, list[Any]]:
    """Of a checkpoint what `ParamGroups.places` says of an engine."""
    return {name: [each["trains"], each["group"], each["generation"]] for name, each in manifest.parameters.items()}


def added_groups(manifest: Manifest, groups: ParamGroups) -> list[dict[str, Any]]:
    """The settings of groups that came after those the engine has."""
    added = manifest.content["groups"][len(groups.hyperparameters) :]
    return [
        {name: restored(value, deepcopy(groups.defaults.get(name))) for name, value in settings.items()}
        for settings in (without_objects(group["hyperparameters"]) for group in added)
    ]


def require_alike(folder: Path, manifest: Manifest, holdings: Holdings) -> None:
    """Make sure that what the engine updates as one has the same kinds of state in a checkpoint. Collective.

    Raises:
        CheckpointError: on every rank; it has not.
    """

    def check() -> None:
        for bucket in holdings.trained:
            kinds: dict[Any, tuple[str, Any]] = {}
            for each in bucket.spec.parameters:
                if not each.is_updated_whole and each.parameter.numel() > 0:
                    mine = manifest.parameters[each.names[0]]["tensors"].keys()
                    first, theirs = kinds.setdefault(each.span, (each.names[0], mine))
                    if mine != theirs:
                        said = f"{each.names[0]} has {', '.join(mine)} in it"
                        raise CheckpointError(f"{said}, and {first}, which is updated with it, {', '.join(theirs)}")

    _, error = attempt(check)
    raise_first(holdings.collectives, error, doing=f"loading {folder}", left="no number of the engine has changed")


def fill(folder: Path, manifest: Manifest, holdings: Holdings) -> None:
    """Give an engine what a verified checkpoint holds. Collective.

    Raises:
        CheckpointError: on every rank; a file has changed since it was verified.
    """

    for bucket in holdings.buckets:
        bucket.weights.begin_refill()  # waits for gathers: not where one rank alone may fail

    def read() -> None:
        with Reader(folder, manifest) as reader:
            for bucket in holdings.buckets:
                _fill_bucket(bucket, manifest, reader)
            _fill_buffers(holdings, manifest, reader)
            restore_extra_states(holdings.model, manifest.content.get(EXTRA_STATE, {}), reader)

    _, error = attempt(read)
    raise_first(holdings.collectives, error, doing=f"loading {folder}", left=HALF)
    for bucket in holdings.buckets:
        if isinstance(bucket, TrainedBucket):
            bucket.update.refilled()
        bucket.weights.end_refill()
        bucket.forget()
    for group, saved in zip(holdings.groups.hyperparameters, manifest.content["groups"], strict=True):
        restore_group(group, saved["hyperparameters"], saved["first_lr"])  # type: ignore[arg-type]


def _fill_bucket(bucket: Bucket, manifest: Manifest, reader: Reader) -> None:
    if isinstance(bucket, TrainedBucket):
        _make_state(bucket, manifest)
    for role in roles(bucket):
        for piece in replaced_weights(bucket) if role == WEIGHT else pieces(bucket, role):
            saved = manifest.parameters[piece.managed.names[0]]["tensors"][role]
            reader.read(saved, piece.in_tensor.start if piece.in_tensor else 0, piece.values)
    bucket.forget()


def _make_state(bucket: TrainedBucket, manifest: Manifest) -> None:
    """Let the optimizer have the tensors and counts that the checkpoint has, the tensors with zeros for now."""
    update, members = bucket.update, bucket.spec.parameters
    for span in update.spans:
        alike = [each for each in members if each.span == span.key and not each.is_updated_whole]
        # Of a parameter without elements nobody has saved anything.
        source = next((each for each in alike if each.parameter.numel() > 0), alike[0])
        saved = manifest.parameters[source.names[0]]
        state = update.span_state(span)
        state.clear()
        state.update(_counts(saved, state, update.device, update.hyperparameters_of(span.key[0])))
        for role, tensor in saved["tensors"].items():
            if role != WEIGHT:
                state[role] = torch.zeros_like(span.target, dtype=dtype_of(tensor))
    for slot in update.whole.targets if update.whole is not None else ():
        saved = manifest.parameters[members[slot].names[0]]
        state = update.whole_state(slot)
        state.clear()
        state.update(_counts(saved, state, update.device, update.hyperparameters_of(members[slot].group)))
        for role, tensor in saved["tensors"].items():
            if role != WEIGHT:
                state[role] = torch.zeros(tensor["shape"], dtype=dtype_of(tensor), device=update.master_weight.device)


def _counts(
    saved: Mapping[str, Any], state: Mapping[str, Any], device: torch.device, settings: Mapping[str, Any]
) -> dict[str, Any]:
    """What the optimizer keeps once. Where its numbers lie is as torch's own `load_state_dict` has it: the number of
    steps on the host, unless an update on the device wants it there, and all others on the device."""
    on_device = bool(settings.get("fused") or settings.get("capturable"))
    found = {}
    for name, value in saved["counts"].items():
        count = restored(value, None) if isinstance(value, dict) else value
        if isinstance(count, torch.Tensor) and (name != "step" or on_device):
            count = count.to(device)
        found[name] = count
    return found


def _fill_buffers(holdings: Holdings, manifest: Manifest, reader: Reader) -> None:
    """On as many ranks as saved them each gets its own, otherwise all get those of rank 0."""
    shards = holdings.collectives.shards
    for name, values in buffers(holdings.model, holdings.buckets).items():
        saved = manifest.buffers[name]
        by_rank = {piece["file"]: piece for piece in saved["pieces"]}
        rank = shards.rank if manifest.num_ranks == shards.size and shards.rank in by_rank else 0
        if values.numel() > 0:
            target = torch.empty(values.numel(), dtype=values.dtype)
            reader.read({**saved, "pieces": [by_rank[rank]]}, 0, target)
            values.data.copy_(target.view(values.shape))
