"""`zerotrain slurm [sbatch options] -- settings`: a file for sbatch, of a run that outlasts its limit.

Prints the file; --submit hands it to sbatch. All options before -- are sbatch's own, whatever a cluster wants. Each
task is a rank; with one task, launch.nproc_per_node has as many. The settings are checked before.

  zerotrain slurm --nodes=2 --ntasks-per-node=8 --gpus-per-task=1 --time=4:00:00 -- zero.stage=3
  zerotrain slurm --submit --ntasks=4 --time=30 -- data.path=docs train.max_steps=50

The job runs in outputs/slurm-<job>. When its time is up, or it is preempted, it saves, is queued again and goes on.

Exit code 0: the file is printed, or sbatch has taken it; 1: sbatch has not; 2: an option or a setting is wrong, one
line each.
"""

import shlex
import subprocess
import sys
from collections.abc import Sequence

from zerotrain.commands.frame import exit_code, parser_of, program
from zerotrain.commands.train import composed_config
from zerotrain.errors import ConfigError

DEFAULTS = {"--job-name": "zerotrain", "--open-mode": "append", "--requeue": None, "--signal": "USR1@120"}
"""Options of sbatch, unless others are given: a job queued again appends to its output, and Slurm signals the ranks two
minutes before the time is up."""
_SHORT = {"-J": "--job-name", "--no-requeue": "--requeue"}
"""Short options of sbatch, and options against one of `DEFAULTS`: the long option they stand for."""
_NOT_OURS = ("--wrap", "--array-inx")
SUBMIT = "--submit"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    parser = parser_of("slurm", __doc__)
    parser.usage = f"{program()} slurm [--submit] [sbatch options] -- [settings]"
    if not words or words[0] in ("-h", "--help"):
        parser.print_help()
        return 0
    return exit_code(lambda: slurm(words))


def slurm(words: Sequence[str]) -> int:
    """Print the file of a command line, or submit it.

    Raises:
        ConfigError: an option or a setting cannot be.
    """
    place = words.index("--") if "--" in words else len(words)
    options, settings = [word for word in words[:place] if word != SUBMIT], list(words[place + 1 :])
    if not any(setting.startswith("-") for setting in settings):  # those with options are not composed
        composed_config(settings)  # a job may wait for hours until it is refused
    text = batch_file(options, settings)
    if SUBMIT not in words[:place]:
        print(text, end="", flush=True)
        return 0
    try:
        return int(subprocess.run(["sbatch"], input=text, text=True).returncode != 0)
    except OSError as error:
        raise ConfigError(
            f"{SUBMIT}: sbatch cannot be run on this machine: {error.strerror}; leave {SUBMIT} out, and hand the file "
            "to sbatch on another"
        ) from error


def batch_file(options: Sequence[str], settings: Sequence[str]) -> str:
    """The file for sbatch.

    Args:
        options: of sbatch, as on its command line.
        settings: of the run.
    """
    lines = _grouped(options)
    names = {line[0].partition("=")[0] for line in lines}
    names |= {_SHORT[name] for name in names if name in _SHORT}
    lines += [[name if value is None else f"{name}={value}"] for name, value in DEFAULTS.items() if name not in names]
    command = shlex.join([sys.executable, "-m", "zerotrain", "launch.requeue=true", *settings])
    return "\n".join(
        [
            "#!/bin/bash",
            *(f"#SBATCH {shlex.join(line)}" for line in lines),
            "# Each task is a rank. At SIGUSR1 they save; rank 0 queues the job again, which goes on in its folder.",
            f"exec srun {command}",
            "",
        ]
    )


def _grouped(options: Sequence[str]) -> list[list[str]]:
    """Each option with its value, which may be the next argument."""
    lines: list[list[str]] = []
    for word in options:
        if "\n" in word or word.partition("=")[0] in _NOT_OURS:
            raise ConfigError(f"{word.partition('=')[0] or word}: it cannot stand in a file for sbatch; leave it out")
        if word.startswith("-"):
            lines.append([word])
        elif lines and "=" not in lines[-1][0] and len(lines[-1]) == 1:
            lines[-1].append(word)
        else:
            raise ConfigError(
                f"{word}: it is no option of sbatch; settings stand behind --, as in slurm --ntasks=4 -- {word}"
            )
    return lines
