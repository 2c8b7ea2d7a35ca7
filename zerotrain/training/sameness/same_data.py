"""That all ranks read the same data, and the same that was checked before they started."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from zerotrain.comm.collectives import Collectives
from zerotrain.errors import ConfigError


def require_same_data(collectives: Collectives, mine: Mapping[str, Any], checked: Mapping[str, Any] | None) -> None:
    """Compare what the dataset of each rank is. Collective: one number from each, and more where they differ.

    Args:
        mine: what this rank has, by `zerotrain.data.fetch`.
        checked: what the process had that checked the data before any rank started; None where nobody did.

    Raises:
        ConfigError: on every rank, with a line for each thing that differs.
    """
    number = torch.tensor([_number(mine)], dtype=torch.int64, device=collectives.world.device)
    numbers = collectives.gather_small(number, name="data").flatten().tolist()
    if len(set(numbers)) > 1:
        by_rank = collectives.gather_objects(dict(mine), name="data")
        advice = "give all machines the same files, and seed what a dataset draws alike on all ranks"
        named = {f"on rank {rank}": each for rank, each in enumerate(by_rank)}
        raise ConfigError(*_differences(named, "the ranks differ", advice))
    if checked is not None and dict(checked) != dict(mine):
        advice = (
            "nothing may write to the data or to its folder while a run starts, and a dataset with random items must "
            "seed its generators; start the run again"
        )
        raise ConfigError(
            *_differences(
                {"when it was checked": checked, "on all ranks": mine}, "it has changed since it was checked", advice
            )
        )


def _differences(by_holder: Mapping[str, Mapping[str, Any]], what: str, advice: str) -> list[str]:
    names = dict.fromkeys(name for each in by_holder.values() for name in each)
    lines = []
    for name in names:
        holders: dict[Any, list[str]] = {}
        for holder, each in by_holder.items():
            holders.setdefault(each.get(name, "nothing"), []).append(holder)
        if len(holders) > 1:
            said = ", ".join(f"{value} {_listed(on)}" for value, on in holders.items())
            lines.append(f"data: {what}: {name.replace('_', ' ')}: {said}; {advice}")
    return lines


def _listed(holders: Sequence[str]) -> str:
    """Several ranks as "on ranks 0, 1"."""
    first, *others = holders
    return first.replace("rank", "ranks") + "".join(f", {each.split()[-1]}" for each in others) if others else first


def _number(fingerprint: Mapping[str, Any]) -> int:
    text = json.dumps(fingerprint, sort_keys=True, default=str)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7])
