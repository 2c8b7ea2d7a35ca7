"""The memory, the disk and the files that a machine has for a run, looked at before any rank starts.

Only what a run certainly keeps at once is counted, so that nothing is refused that fits: the rows of a step, and the
bytes of its rehearsal.
"""

import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from weakref import WeakValueDictionary

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from zerotrain.comm.whereabouts import files_problem
from zerotrain.config.schema import Config
from zerotrain.device.kinds import device_of, num_gpus
from zerotrain.errors import ConfigError, OffloadError
from zerotrain.offload.disk import ScratchFile, file_system_of, lies_in_memory
from zerotrain.offload.tier import SAMPLE_NBYTES, available_nbytes, most_of_process
from zerotrain.sharding.plan import STAGES

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


def require_folder(config: Config, run_dir: Path | None) -> None:
    """Make sure that a file can be made in the folder that a run offloads to, if it offloads to a disk.

    Args:
        run_dir: the folder that a null `offload.path` stands for.

    Raises:
        ConfigError: none can.
    """
    offload = config.offload
    if not offload.uses_disk or (run_dir is None and offload.path is None):
        return
    _, base = _folders(Path(offload.path or run_dir or ""))
    try:
        ScratchFile(base, "this run")
    except OffloadError as error:
        raise ConfigError(f"{error}; name another folder") from error


def require_disk(config: Config, run_dir: Path | None, placed_nbytes: int, ranks: Ranks) -> None:
    """Make sure that the disk has as much free as the ranks of this machine place there, and a sample to measure its
    speed by. Room for activations is unknown and not counted.

    Args:
        run_dir: as for `require_folder`.
        placed_nbytes: of a rank.

    Raises:
        ConfigError: it is too small.
    """
    if not placed_nbytes or (run_dir is None and config.offload.path is None):
        return
    folder, base = _folders(Path(config.offload.path or run_dir or ""))
    needed = ranks.num_local * (placed_nbytes + min(placed_nbytes, SAMPLE_NBYTES))
    free = shutil.disk_usage(base).free
    if needed > free:
        raise ConfigError(
            f"offload.path: {folder} has {free / 1e9:.3g} GB free, and this run needs {needed / 1e9:.3g} GB there; "
            "name a folder on a larger disk, or offload less (offload.keep)"
        )


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

    def split(self, device_nbytes: float, host_nbytes: float) -> dict[str, float]:
        """Bytes by memory, of those that lie where a rank computes and of those that are offloaded to the host."""
        nbytes = dict.fromkeys(("host", self.device), 0.0)
        nbytes[self.device] += device_nbytes
        nbytes["host"] += host_nbytes
        return nbytes

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
    itemsize = 4 if config.precision.name == "fp32" else 2
    may_share = any(plan.shards_parameters for plan in STAGES if STAGES.index(plan) in config.zero.stages.values())
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
