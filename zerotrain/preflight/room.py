"""Whether a run fits the memory of its machine, looked at before any rank starts.

Only what a run certainly keeps at once is counted, so that nothing is refused that fits: weights, gradients and
optimizer state as its stage shares them, the rows of a step, and what the forward of a large micro-batch saves.
"""

import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode

from zerotrain.comm.whereabouts import files_problem
from zerotrain.config.schema import Config
from zerotrain.data.fetch import as_inputs, tensors_in, with_tensors
from zerotrain.device.kinds import device_of, num_gpus
from zerotrain.engine.groups.optimizers import SAMPLE_SHAPE, OptimizerFactory, sampled_nbytes, updates_whole
from zerotrain.engine.model.precision import dtypes_of, precision_named
from zerotrain.errors import ConfigError, OffloadError
from zerotrain.offload.disk import ScratchFile, file_system_of, lies_in_memory
from zerotrain.offload.tier import SAMPLE_NBYTES, available_nbytes, most_of_process
from zerotrain.run.factory import averages_in, build_optimizer_factory
from zerotrain.sharding.plan import STAGES, Plan, Volume
from zerotrain.sharding.units import model_parameters

# The parameters of a model while its constructor still makes them.


class LiveParameters:
    """Counts the elements of the parameters that modules have been given."""

    def __init__(self) -> None:
        self._made: WeakValueDictionary[int, nn.Parameter] = WeakValueDictionary()
        self.numel = 0
        """At least those that live: a parameter that was made and dropped counts until `recount`."""

    def add(self, parameter: nn.Parameter) -> None:
        if id(parameter) not in self._made:
            self._made[id(parameter)] = parameter
            self.numel += parameter.numel()

    def recount(self) -> int:
        """Count those that live; return their elements."""
        self.numel = sum(parameter.numel() for parameter in self._made.values())
        return self.numel


@contextmanager
def watching_parameters(look: Callable[[LiveParameters], None]) -> Iterator[None]:
    """Inside, `look` is called whenever a module gets a parameter, and may raise to end a constructor that would make
    millions of them."""
    live = LiveParameters()

    def registered(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None:
            live.add(parameter)
            look(live)

    hook = register_module_parameter_registration_hook(registered)
    try:
        yield
    finally:
        hook.remove()


# Room for offloaded state, and for the files of ranks, before any rank starts.


@dataclass(frozen=True)
class Ranks:
    """Ranks of a run, and those on this machine."""

    num_ranks: int
    num_local: int


def require_room(config: Config, model: nn.Module | None, run_dir: Path | None, ranks: Ranks) -> None:
    """Make sure that a disk that is offloaded to can be, and has as much free as the ranks of this machine will take.
    Room for activations is unknown and not counted.

    Args:
        model: without memory; None: its size is not known, and the ranks find out.
        run_dir: the folder that a null `offload.path` stands for.

    Raises:
        ConfigError: no file can be made in the folder, or the disk is too small.
    """
    offload = config.offload
    if not offload.uses_disk or (run_dir is None and offload.path is None):
        return
    folder, base = _folders(Path(offload.path or run_dir or ""))
    try:
        ScratchFile(base, "this run")
    except OffloadError as error:
        raise ConfigError(f"{error}; name another folder") from error
    needed = 0 if model is None else _needed_nbytes(config, model, ranks)
    free = shutil.disk_usage(base).free
    if needed > free:
        raise ConfigError(
            f"offload.path: {folder} has {free / 1e9:.3g} GB free, and this run needs {needed / 1e9:.3g} GB there; "
            "name a folder on a larger disk, or offload less (offload.keep)"
        )


def plans_of(stages: Iterable[Any]) -> list[Plan]:
    """Plans of those stages that exist: other stages are reported elsewhere."""
    numbers = list(stages)
    return [plan for stage, plan in enumerate(STAGES) if stage in numbers]


def is_on_host(config: Config) -> bool:
    """Whether the ranks of this machine compute on the CPU."""
    return config.launch.device == "cpu" or not num_gpus()


def file_problems(num_ranks: int) -> list[str]:
    """A line where a rank on the CPU may open fewer files than it needs to meet the others; none otherwise.

    With 20 files two ranks waited for each other until `launch.timeout_s` was over (2026-11-23): the kernel drops
    a file that another rank sends to a process that may open no more. With 12, gloo's own thread aborted the process.
    """
    problem = files_problem(num_ranks)
    return [f"launch: {problem}"] if problem else []


def in_memory(config: Config, run_dir: Path) -> list[str]:
    """A line where what is offloaded stays in the memory that it comes from; none otherwise."""
    if config.offload.activations == "cpu" and is_on_host(config):
        return [
            "offload.activations=cpu: a run on the CPU has its activations in host memory already, so that this adds "
            "copies; leave it out, or give disk"
        ]
    folder, base = _folders(Path(config.offload.path or run_dir))
    if "disk" not in (config.offload.optimizer, config.offload.parameters) or not lies_in_memory(base):
        return []
    return [
        f"offload.path: {folder} is in memory ({file_system_of(base)}), so that offloading to it frees none; "
        "name a folder on a disk"
    ]


def _folders(path: Path) -> tuple[Path, Path]:
    """It, and the first of it and those around it that is there."""
    folder = path.absolute()
    return folder, next(candidate for candidate in (folder, *folder.parents) if os.path.lexists(candidate))


def _needed_nbytes(config: Config, model: nn.Module, ranks: Ranks) -> int:
    """Bytes of all ranks of this machine at the stage that takes most, with those that they measure its rates by."""
    volume, optimizer_nbytes = model_sizes(config, model, build_optimizer_factory(config), ranks)
    needed = 0.0
    for plan in plans_of(config.zero.stages.values()):
        held, placed = volume.memory_nbytes(plan, optimizer_nbytes), 0.0
        if config.offload.optimizer == "disk":
            placed += ranks.num_local * held["optimizer"] * (1 - config.offload.keep)
        if config.offload.parameters == "disk" and plan.shards_parameters:
            placed += ranks.num_local * held["parameters"]
        needed = max(needed, placed)
    sample = min(needed, ranks.num_local * SAMPLE_NBYTES)
    return round(needed + sample)


def model_sizes(config: Config, model: nn.Module, factory: OptimizerFactory, ranks: Ranks) -> tuple[Volume, int]:
    """Bytes of weights and gradients; and of the optimizer's state, with master weights that are copies and the
    average of weights: 0 of a state that cannot be tried here, as it needs a GPU."""
    precision = precision_named(config.precision.name, tuple(config.precision.keep_fp32))
    held = dtypes_of(model_parameters(model), precision)
    trained = {parameter: dtype for parameter, dtype in held.items() if parameter.requires_grad}
    trainable, frozen = (
        sum(
            parameter.numel() * dtype.itemsize for parameter, dtype in held.items() if parameter.requires_grad is trains
        )
        for trains in (True, False)
    )
    per_element = 0.0
    with suppress(Exception):
        sampled = [sampled_nbytes(factory, is_whole=True)] if updates_whole(factory) else []
        if hasattr(factory, "needs_whole") or not sampled:
            sampled.append(sampled_nbytes(factory, is_whole=False))
        per_element = min(sampled) / (SAMPLE_SHAPE[0] * SAMPLE_SHAPE[1])
    copies = sum(parameter.numel() for parameter, dtype in trained.items() if dtype != precision.master)
    if averages_in(config):
        copies += sum(parameter.numel() for parameter in trained)
    state = per_element * sum(parameter.numel() for parameter in trained) + copies * precision.master.itemsize
    return Volume(trainable, frozen, ranks.num_ranks), round(state)


LARGE_NUMEL = 2**20
"""Elements of a micro-batch from which on its forward is tried without memory."""
PATIENCE_S = 2.0
"""So long a model is built that has no room, to know how much it would need."""
PLANNING_S = 60.0
"""So long a model is built that is only planned, for which there is always room."""
SMALLER_MODEL = (
    "choose a smaller model, or less of it on a machine: more machines with zero.stage=3, precision=bf16, "
    "offload.optimizer=disk"
)
SMALLER_BATCH = "choose a smaller train.micro_batch_size, train.gradient_accumulation_steps or data.seq_len"


@dataclass(frozen=True)
class Room:
    """Bytes that each rank of this machine can have."""

    host: float
    gpu: float
    """0 for ranks that compute on the CPU."""

    @classmethod
    def of_machine(cls, device: torch.device | None, num_local: int) -> "Room":
        """That of this one, shared by its ranks."""
        gpu = 0 if device is None else device_of(device).own_nbytes
        return cls(min(available_nbytes() / num_local, most_of_process()), gpu)

    @property
    def device(self) -> str:
        """The memory that a rank computes in."""
        return "gpu" if self.gpu else "host"

    def require(self, group: str, nbytes: Mapping[str, float], num_local: int, what: str, advice: str) -> None:
        """Make sure that there is room for a rank's bytes, by the memory that they lie in."""
        for memory, where, num in (("gpu", "its GPU has", 1), ("host", "there are", num_local)):
            if nbytes.get(memory, 0) > getattr(self, memory):
                whose = "a rank" if num == 1 else f"{num} ranks of this machine"
                needed, available = _in_gb(num * nbytes[memory]), _in_gb(num * getattr(self, memory))
                raise ConfigError(
                    f"{group}: needs more memory than there is: {what} of {whose} would take {needed} or more, and "
                    f"{where} {available}; {advice}"
                )


def _in_gb(nbytes: float) -> str:
    return f"{nbytes / 1e9:,.0f} GB" if nbytes >= 1e11 else f"{nbytes / 1e9:.3g} GB"


def refusing_too_large(config: Config, ranks: Ranks, room: Room) -> AbstractContextManager[None]:
    """Inside, a model whose weights alone have no room is refused before the last of a million layers is made, which
    would take minutes even without memory. So is one that is planned and takes minutes."""
    itemsize = precision_named(config.precision.name).compute.itemsize
    may_share = any(plan.shards_parameters for plan in plans_of(config.zero.stages.values()))
    num_sharing = ranks.num_ranks if may_share else 1
    patient_until_s = time.monotonic() + (PLANNING_S if config.plan.only else PATIENCE_S)
    most_numel = getattr(room, room.device) * num_sharing / itemsize

    def look(live: LiveParameters) -> None:
        if config.plan.only and time.monotonic() > patient_until_s:
            raise ConfigError(
                f"model: has {live.recount():,} parameters after {PLANNING_S:.0f} s, and is not complete; a plan "
                "builds all of it several times: choose a smaller model"
            )
        if live.numel > most_numel and time.monotonic() > patient_until_s:
            nbytes = live.recount() * itemsize / num_sharing
            room.require("model", {room.device: nbytes}, ranks.num_local, "the weights", SMALLER_MODEL)

    is_elsewhere = config.offload.parameters != "device" and not config.plan.only
    return nullcontext() if is_elsewhere else watching_parameters(look)


def require_rows(config: Config, row_nbytes: int, num_rows: int, ranks: Ranks, room: Room) -> None:
    """Make sure that there is memory for the rows, of the `num_rows` of the data, that each rank reads in a step."""
    num_rows = min(num_rows, config.train.micro_batch_size * config.train.gradient_accumulation_steps)
    nbytes = {"host": float(num_rows * row_nbytes)}
    room.require("data", nbytes, ranks.num_local, f"the {num_rows} rows of a step", SMALLER_BATCH)


def require_memory(
    config: Config,
    model: nn.Module,
    optimizer: OptimizerFactory,
    row: Any,
    ranks: Ranks,
    room: Room,
    stages: Iterable[int],
) -> None:
    """Make sure that there is memory for what each rank of this machine keeps at once.

    Args:
        model: without memory.
        optimizer: what it is made by.
        row: a batch of one.
        stages: that the run is to be at.
    """
    volume, optimizer_nbytes = model_sizes(config, model, optimizer, ranks)
    saved_nbytes = _saved_nbytes(config, model, row)
    for plan in plans_of(stages):
        held_nbytes: dict[str, float] = {**volume.memory_nbytes(plan, optimizer_nbytes)}
        at_rest = _by_memory(config, plan, held_nbytes, room.device)
        subject = f"weights, gradients and optimizer state at stage {STAGES.index(plan)}"
        room.require("model", at_rest, ranks.num_local, subject, SMALLER_MODEL)
        held_nbytes |= {"gradients": 0.0, "saved": saved_nbytes}
        subject = f"what the forward of {config.train.micro_batch_size} rows saves, with weights and optimizer state,"
        in_forward = _by_memory(config, plan, held_nbytes, room.device)
        room.require("train.micro_batch_size", in_forward, ranks.num_local, subject, SMALLER_BATCH)


def _by_memory(config: Config, plan: Plan, held_nbytes: Mapping[str, float], device: str) -> dict[str, float]:
    """Bytes of a rank by the memory they lie in; what lies on a disk takes none."""
    offload, by_memory = config.offload, dict.fromkeys(("host", device), 0.0)
    tiers = {"optimizer": offload.optimizer} | ({"parameters": offload.parameters} if plan.shards_parameters else {})
    for kind, nbytes in held_nbytes.items():
        tier = tiers.get(kind, "device")
        stays = 1.0 if tier == "device" else offload.keep if kind == "optimizer" else 0.0
        by_memory[device] += nbytes * stays
        by_memory["host"] += nbytes * (1 - stays) if tier == "cpu" else 0.0
    return by_memory


def _saved_nbytes(config: Config, model: nn.Module, row: Any) -> float:
    """Bytes that the forward of a micro-batch saves for its backward, tried without memory; 0 for a small one, and if
    they cannot be known: it computes with values, or the run moves or compiles what it saves."""
    num_rows, shapes = config.train.micro_batch_size, [tensor.shape for tensor in tensors_in(row)]
    numel = sum(shape.numel() for shape in shapes) * num_rows
    moves = any(config.forward_switches.values()) or config.offload.activations != "device"
    if moves or numel < LARGE_NUMEL or any(shape[:1] != (1,) for shape in shapes):
        return 0.0
    inputs = as_inputs(with_tensors(row, lambda tensor: tensor.new_empty((num_rows, *tensor.shape[1:]), device="meta")))
    shrunk = precision_named(config.precision.name).compute.itemsize / torch.float32.itemsize
    own = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    saved: dict[int, tuple[StorageWeakRef, float]] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        memory = tensor.untyped_storage()
        if memory._cdata not in own:
            nbytes = memory.nbytes() * (shrunk if tensor.is_floating_point() else 1)
            saved[memory._cdata] = StorageWeakRef(memory), nbytes
        return tensor

    with (
        suppress(Exception),
        _WithoutAttention(),
        torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor),
    ):
        _ = model(**inputs) if isinstance(inputs, Mapping) else model(*inputs)  # kept: its graph holds what is saved
    return sum(nbytes for memory, nbytes in saved.values() if not memory.expired())


class _WithoutAttention(TorchFunctionMode):
    """Inside, attention gives a tensor of the right shape and saves nothing: without memory torch takes the variant
    that saves each pair of tokens, which no device does that has another."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.nn.functional.scaled_dot_product_attention and len(args) >= 3:
            query, _, value = args[:3]
            return query.new_empty(*query.shape[:-1], value.shape[-1])
        return func(*args, **(kwargs or {}))
