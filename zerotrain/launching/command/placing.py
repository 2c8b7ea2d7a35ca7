"""The ranks of a command, and the device they compute on."""

from zerotrain.comm.environment import RankEnvironment
from zerotrain.config.schema import Config
from zerotrain.device.kinds import num_gpus
from zerotrain.preflight.room import Ranks


def device_for(wanted: str, num_local_ranks: int, num_gpus: int) -> tuple[str, str | None]:
    """The device of the ranks, and a line to print if `auto` falls back to the CPU.

    Each rank needs a GPU of its own. With too few, auto is the CPU: users start two ranks on a machine with one GPU to
    see how ranks work together. A device asked for by name is kept, and refused later.

    Args:
        wanted: cpu, cuda or auto.
    """
    if wanted != "auto" or not 0 < num_gpus < num_local_ranks:
        return wanted, None
    number = "1 GPU" if num_gpus == 1 else f"{num_gpus} GPUs"
    return "cpu", (
        f"launch.device=auto: {num_local_ranks} ranks need a GPU each and this machine has {number}, so they run on "
        f"the CPU; launch.nproc_per_node={num_gpus} uses the GPU"
    )


def all_ranks(config: Config, ranks: RankEnvironment | None) -> Ranks:
    """Those that torchrun has started, else those to plan for or to start."""
    if ranks is not None:
        return Ranks(ranks.world_size, ranks.local_world_size)
    num_local = num_local_ranks(config)
    num_ranks = (config.plan.only and config.plan.num_ranks) or num_local
    return Ranks(num_ranks, min(num_local, num_ranks))


def num_local_ranks(config: Config) -> int:
    """Ranks to start on this machine: as set, else one for each GPU, else one."""
    return config.launch.nproc_per_node or max(1, 0 if config.launch.device == "cpu" else num_gpus())
