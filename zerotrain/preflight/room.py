"""The memory, the disk and the open files of a machine, before any rank of a run starts.

Counted are only the rows of a step and the bytes of its rehearsal: a run certainly keeps these at once, and no run is
refused if it fits.
"""

import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from weakref import ref

import torch
from torch.nn.modules.module import register_module_parameter_registration_hook

from zerotrain.comm.whereabouts import files_problem
from zerotrain.config.schema import Config
from zerotrain.device.kinds import device_of, num_gpus
from zerotrain.errors import ConfigError, OffloadError
from zerotrain.offload.disk import ScratchFile, file_system_of, lies_in_memory
from zerotrain.offload.tier import SAMPLE_NBYTES, available_nbytes, most_of_process
from zerotrain.sharding.plan import STAGES

# The parameters of a model while its constructor still makes them.


@contextmanager
def watching_parameters(look: Callable[[int], None]) -> Iterator[None]:
    """Inside, `look` gets the elements of all live parameters whenever a module has got a new one. It may raise, to end
    a constructor on its way to millions of them."""
    made: dict[int, ref[torch.nn.Parameter]] = {}
    live_numel = 0

    def forget(key: int, numel: int, _: ref[torch.nn.Parameter]) -> None:
        nonlocal live_numel
        del made[key]
        live_numel -= numel

    def registered(module: torch.nn.Module, name: str, parameter: torch.nn.Parameter | None) -> None:
        nonlocal live_numel
        if parameter is not None and (key := id(parameter)) not in made:
            numel = parameter.numel()
            made[key] = ref(parameter, partial(forget, key, numel))
            live_numel += numel
            look(live_numel)

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
    """Make sure that a file can be made in the folder of a run for offloading, if it offloads to a disk.

    Args:
        run_dir: the folder if `offload.path` is null.

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
    """Make sure that the disk has room for the state of this machine's ranks, and for a sample to measure its speed.
    Activations are not counted: their bytes are unknown.

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
    """A line if a rank on the CPU may open fewer files than it needs to meet the others; none otherwise.

    With 20 files two ranks waited for each other until `launch.timeout_s` was over (2026-11-23): the kernel drops
    a file sent to a process with no number left for it. With 12, gloo's own thread aborted the process.
    """
    problem = files_problem(num_ranks)
    return [f"launch: {problem}"] if problem else []


def in_memory(config: Config, run_dir: Path) -> list[str]:
    """A line if offloading leaves everything in the memory it comes from; none otherwise."""
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
    """A folder, and the first existing one of it and those around it."""
    folder = path.absolute()
    return folder, next(candidate for candidate in (folder, *folder.parents) if os.path.lexists(candidate))


PATIENCE_S = 2.0
"""CPU seconds: a model without room is built for so long, to know how much it would need."""
PLANNING_S = 60.0
"""A model is built for a plan for so long; a plan always has room for it. On a busy machine the clock runs on."""
SMALLER_MODEL = (
    "choose a smaller model, or less of it on a machine: more machines with zero.stage=3, precision=bf16, "
    "offload.optimizer=disk"
)
SMALLER_BATCH = "choose a smaller train.micro_batch_size, train.gradient_accumulation_steps or data.seq_len"


@dataclass(frozen=True)
class Room:
    """Memory for each rank of this machine, in bytes."""

    host: float
    gpu: float
    """0 for ranks on the CPU."""

    @classmethod
    def of_machine(cls, device: torch.device | None, num_local: int) -> "Room":
        """The memory of this machine, shared by its ranks."""
        gpu = 0 if device is None else device_of(device).own_nbytes
        return cls(min(available_nbytes() / num_local, most_of_process()), gpu)

    @property
    def device(self) -> str:
        """The memory a rank computes in."""
        return "gpu" if self.gpu else "host"

    def split(self, device_nbytes: float, host_nbytes: float) -> dict[str, float]:
        """Bytes by memory, from the bytes on the device of a rank and those offloaded to the host."""
        nbytes = dict.fromkeys(("host", self.device), 0.0)
        nbytes[self.device] += device_nbytes
        nbytes["host"] += host_nbytes
        return nbytes

    def require(self, group: str, nbytes: Mapping[str, float], num_local: int, what: str, advice: str) -> None:
        """Make sure that there is room for a rank's bytes, by memory."""
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
    """Inside, a model is refused if its weights alone have no room, before the last of a million layers is made: even
    without memory that takes minutes. So is a planned one if it takes minutes."""
    itemsize = 4 if config.precision.name == "fp32" else 2
    may_share = any(plan.shards_parameters for plan in STAGES if STAGES.index(plan) in config.zero.stages.values())
    num_sharing = ranks.num_ranks if may_share else 1
    patient_until_s = time.process_time() + (PLANNING_S if config.plan.only else PATIENCE_S)
    most_numel = getattr(room, room.device) * num_sharing / itemsize

    def look(numel: int) -> None:
        if config.plan.only and time.process_time() > patient_until_s:
            raise ConfigError(
                f"model: has {numel:,} parameters after {PLANNING_S:.0f} s, and is not complete; a plan "
                "builds all of it several times: choose a smaller model"
            )
        if numel > most_numel and time.process_time() > patient_until_s:
            nbytes = numel * itemsize / num_sharing
            room.require("model", {room.device: nbytes}, ranks.num_local, "the weights", SMALLER_MODEL)

    is_elsewhere = config.offload.parameters != "device" and not config.plan.only
    return nullcontext() if is_elsewhere else watching_parameters(look)
