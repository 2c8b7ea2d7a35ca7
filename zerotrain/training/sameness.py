"""Equal runs: the same data on all ranks, random numbers by place, and the generators that a model keeps.

Torch's, Python's and numpy's global ones are seeded anew for each micro-batch (`seed_leaf`), so nothing need be kept of
them. A generator that a module has made for itself goes on from where it is: its state belongs to a checkpoint.
"""

import hashlib
import json
import os
import random
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from zerotrain.comm.collectives import Collectives
from zerotrain.device.kinds import seed_torch
from zerotrain.errors import ConfigError

# Torch's kernels on GPUs: those of equal bits from equal runs, as far as torch can promise them, or faster ones.


def choose_kernels(*, deterministic: bool, tf32: bool) -> None:
    """Do in this process, from now on, as `train.deterministic` and `precision.tf32` say. To be called before the first
    use of a GPU.

    Deterministic algorithms have the same bits each time; those without such a variant raise torch's own RuntimeError,
    which names them. Matrix products do without TF32; cuBLAS gets a workspace of fixed size, unless the environment has
    set one; cuDNN does not choose algorithms by their speed. (torch's notes on reproducibility.)
    """
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
    if deterministic or tf32:
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = not deterministic


def generator_states(model: torch.nn.Module) -> dict[str, Any] | None:
    """The states of generators in attributes of modules, by dotted name, for JSON; None: there are none."""
    return {name: _state_of(generator) for name, generator in _generators(model)} or None


def restore_generators(model: torch.nn.Module, states: Mapping[str, Any] | None) -> None:
    """Give generators their states from `generator_states`; a generator without one stays as it is."""
    for name, generator in _generators(model):
        if states is not None and name in states:
            _restore(generator, states[name])


def _generators(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    for prefix, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, torch.Generator | random.Random | np.random.Generator | np.random.RandomState):
                yield f"{prefix}.{name}" if prefix else name, value


def _state_of(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state().tolist()
    if isinstance(generator, random.Random):
        version, numbers, gauss = generator.getstate()
        return [version, list(numbers), gauss]
    is_old = isinstance(generator, np.random.RandomState)
    state = generator.get_state(legacy=False) if is_old else generator.bit_generator.state
    return json.loads(json.dumps(state, default=_described))


def _described(value: Any) -> Any:
    """An array or a number of numpy, for JSON."""
    return {"dtype": str(value.dtype), "values": value.tolist()} if isinstance(value, np.ndarray) else value.item()


def _restored(value: dict[str, Any]) -> Any:
    """The array behind a description of `_described`; any other object as it is."""
    return np.array(value["values"], dtype=value["dtype"]) if value.keys() == {"dtype", "values"} else value


def _restore(generator: Any, state: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(torch.tensor(state, dtype=torch.uint8))
    elif isinstance(generator, random.Random):
        version, numbers, gauss = state
        generator.setstate((version, tuple(numbers), gauss))
    else:
        of_numpy = json.loads(json.dumps(state), object_hook=_restored)
        if isinstance(generator, np.random.RandomState):
            generator.set_state(of_numpy)
        else:
            generator.bit_generator.state = of_numpy


# All ranks read the same data, and it is the data that was checked before they started.


def require_same_data(collectives: Collectives, own: Mapping[str, Any], checked: Mapping[str, Any] | None) -> None:
    """Compare what the dataset of each rank is. Collective: one number from each, and more where they differ.

    Args:
        own: the fingerprint of this rank's data, by `zerotrain.data.fetch`.
        checked: the fingerprint from before any rank started; None where nobody checked the data.

    Raises:
        ConfigError: on every rank, with a line for each thing that differs.
    """
    text = json.dumps(own, sort_keys=True, default=str)
    number = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7])
    tensor = torch.tensor([number], dtype=torch.int64, device=collectives.world.device)
    numbers = collectives.gather_small(tensor, name="data").flatten().tolist()
    if len(set(numbers)) > 1:
        by_rank = collectives.gather_objects(dict(own), name="data")
        advice = "give all machines the same files, and seed what a dataset draws alike on all ranks"
        by_holder = {f"on rank {rank}": fingerprint for rank, fingerprint in enumerate(by_rank)}
        raise ConfigError(*_differences(by_holder, "the ranks differ", advice))
    if checked is not None and dict(checked) != dict(own):
        advice = (
            "nothing may write to the data or to its folder while a run starts, and a dataset with random items must "
            "seed its generators; start the run again"
        )
        by_holder = {"when it was checked": dict(checked), "on all ranks": dict(own)}
        raise ConfigError(*_differences(by_holder, "it has changed since it was checked", advice))


def _differences(by_holder: Mapping[str, Mapping[str, Any]], what: str, advice: str) -> list[str]:
    names = dict.fromkeys(name for fingerprint in by_holder.values() for name in fingerprint)
    lines = []
    for name in names:
        holders: dict[Any, list[str]] = {}
        for holder, fingerprint in by_holder.items():
            holders.setdefault(fingerprint.get(name, "nothing"), []).append(holder)
        if len(holders) > 1:
            values = []
            for value, ranks in holders.items():
                place = ranks[0]
                if len(ranks) > 1:  # such as "on ranks 0, 1"
                    place = ", ".join([place.replace("rank", "ranks"), *(rank.split()[-1] for rank in ranks[1:])])
                values.append(f"{value} {place}")
            lines.append(f"data: {what}: {name.replace('_', ' ')}: {', '.join(values)}; {advice}")
    return lines


# The random numbers of a run: a function of where they are drawn, so that no generator's state need ever be kept.


def seed_leaf(seed: int, step: int, virtual_rank: int, micro_batch: int) -> None:
    """Seed torch's, Python's and numpy's generators for one micro-batch, whichever rank runs it and whatever has been
    drawn before.

    Args:
        seed: of the run.
        step: number of the global batch, from 0.
        micro_batch: number within the virtual rank, from 0.
    """
    place = f"{seed} {step} {virtual_rank} {micro_batch}"
    number = int.from_bytes(hashlib.sha256(place.encode()).digest()[:8])
    seed_torch(number)
    random.seed(number)
    np.random.seed(number % (1 << 32))


seed_leaf.only_seeds = True  # type: ignore[attr-defined]  # so that steps may be graphs
