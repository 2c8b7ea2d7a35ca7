"""`python -m zerotrain slurm [sbatch options] -- settings`: a file for sbatch, of a run that outlasts its limit."""

import shlex
import subprocess
import sys
from collections.abc import Sequence

from zerotrain.commands.frame import exit_code, parser_of
from zerotrain.commands.train import CONF
from zerotrain.config.explain import composition_problems
from zerotrain.errors import ConfigError
from zerotrain.launching.command import composing

DEFAULTS = {"--job-name": "zerotrain", "--open-mode": "append", "--requeue": None, "--signal": "USR1@120"}
"""Options of sbatch, unless others are given: what a job that is queued again prints goes behind what it has printed,
and Slurm signals the ranks two minutes before the time is up."""
_SHORT = {"-J": "--job-name", "--no-requeue": "--requeue"}
"""Other names of these."""
_NOT_OURS = ("--wrap", "--array-inx")
SUBMIT = "--submit"
EXAMPLES = """\
Prints the file; --submit hands it to sbatch. All options before -- are sbatch's own, whatever a cluster wants. Each
task is a rank; with one task, launch.nproc_per_node has as many. The settings are checked before.

  python -m zerotrain slurm --nodes=2 --ntasks-per-node=8 --gpus-per-task=1 --time=4:00:00 -- zero.stage=3
  python -m zerotrain slurm --submit --ntasks=4 --time=30 -- data.path=docs train.max_steps=50

The job runs in outputs/slurm-<job>. When its time is up, or it is preempted, it saves, is queued again and goes on.

Exit code 0: the file is printed, or sbatch has taken it; 1: sbatch has not; 2: an option or a setting is wrong, one
line each.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = parser_of("slurm", __doc__, EXAMPLES)
    parser.usage = "python -m zerotrain slurm [--submit] [sbatch options] -- [settings]"
    if not given or given[0] in ("-h", "--help"):
        parser.print_help()
        return 0
    return exit_code(lambda: slurm(given))


def slurm(given: Sequence[str]) -> int:
    """Print the file of a command line, or submit it.

    Raises:
        ConfigError: an option or a setting cannot be.
    """
    place = given.index("--") if "--" in given else len(given)
    options, settings = [each for each in given[:place] if each != SUBMIT], list(given[place + 1 :])
    _require_settings(settings)
    text = batch_file(options, settings)
    if SUBMIT not in given[:place]:
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
    names |= {_SHORT[each] for each in names if each in _SHORT}
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
    for each in options:
        if "\n" in each or each.partition("=")[0] in _NOT_OURS:
            raise ConfigError(f"{each.partition('=')[0] or each}: it cannot stand in a file for sbatch; leave it out")
        if each.startswith("-"):
            lines.append([each])
        elif lines and "=" not in lines[-1][0] and len(lines[-1]) == 1:
            lines[-1].append(each)
        else:
            raise ConfigError(
                f"{each}: it is no option of sbatch; settings stand behind --, as in slurm --ntasks=4 -- {each}"
            )
    return lines


def _require_settings(settings: Sequence[str]) -> None:
    """Check the settings here: a job may wait for hours until it is refused. Those with options are not composed."""
    if any(each.startswith("-") for each in settings):
        return
    with composing([CONF]) as compose:
        problems = composition_problems(list(settings), compose, is_sweep=False, folders=[CONF])
    if problems:
        raise ConfigError(*problems)
