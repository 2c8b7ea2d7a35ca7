"""The command by which torchrun was started, as its ranks find it: they are its children."""

import os
import re
import sys
from pathlib import Path

from zerotrain.comm.environment import RankEnvironment
from zerotrain.config.words import word
from zerotrain.files.untrusted import printable
from zerotrain.launching.job.earlier import AUTO

OPENS_A_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
"""Set to 1, each attempt of torchrun has a store of its own to meet in."""
_MAX_NBYTES = 2**16
_RANGE = re.compile(r"([0-9]+):([0-9]+)")


def torchrun_options(ranks: RankEnvironment | None) -> list[str] | None:
    """The options that torchrun was started with; None where that cannot be seen, or something else has started us."""
    if ranks is None or ranks.starter != "torchrun" or "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    return options_in(_command_of(os.getppid()), sys.argv[0])


def options_in(command: list[str], program: str) -> list[str] | None:
    """The options of torchrun in a command line, which stand between it and the program; None where there are none.

    Args:
        program: as torchrun was told to run it, which its ranks find as their own name.
    """
    starts = [place for place, word in enumerate(command) if Path(word).name in ("torchrun", "torch.distributed.run")]
    if not starts or program not in command[starts[0] + 1 :]:
        return None
    first = starts[0] + 1
    return command[first : command.index(program, first)]


def elastic_hosts(options: list[str] | None) -> str | None:
    """The range of hosts, such as 1:4, that torchrun may run on; None where their number is given."""
    told = [word.partition("=") for word in options or []]
    for place, (name, is_given, value) in enumerate(told):
        if name.replace("_", "-") == "--nnodes":
            found = value if is_given else "".join(told[place + 1][:1]) if place + 1 < len(told) else ""
            bounds = _RANGE.fullmatch(found)
            return found if bounds and bounds[1] != bounds[2] else None
    return None


def start_problems(resume: str | None, ranks: RankEnvironment | None) -> list[str]:
    """A line where torchrun may start the ranks again on other hosts, and each start would begin the run anew.

    Args:
        resume: `checkpoint.resume`.
    """
    if (hosts := elastic_hosts(torchrun_options(ranks))) is None or resume == AUTO:
        return []
    return [
        f"checkpoint.resume: got {word(resume)}; under torchrun --nnodes={hosts} it must be auto, with a hydra.run.dir "
        "of your own: when hosts come or go the ranks are started again"
    ]


def doubtful_start(max_restarts: int, ranks: RankEnvironment | None) -> list[str]:
    """A line for each thing that torchrun does otherwise than one may think.

    Args:
        max_restarts: `launch.max_restarts`.
    """
    lines = []
    hosts = elastic_hosts(torchrun_options(ranks))
    if hosts is not None and os.environ.get(OPENS_A_STORE) != "1":
        lines.append(
            f"--nnodes={hosts} without {OPENS_A_STORE}=1: by torch's default a host that joins later finds no rank 0, "
            "and all end; set it for torchrun on every host"
        )
    if ranks is not None and max_restarts:
        lines.append("launch.max_restarts has no effect under torchrun; give it --max-restarts")
    return lines


def _command_of(pid: int) -> list[str]:
    """The words of a process's command line; none where they cannot be seen."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            said = file.read(_MAX_NBYTES).decode(errors="replace")
    except OSError:
        return []
    return [printable(word, _MAX_NBYTES) for word in said.rstrip("\0").split("\0")]
