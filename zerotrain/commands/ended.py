"""`zerotrain ended RUN`: how a run has ended, and its exit code as this command's own.

torchrun ends with exit code 1 whatever its ranks have ended with. A job's script says behind it how the run has ended:

  torchrun --nproc-per-node 8 launch.py hydra.run.dir=RUN checkpoint.resume=auto
  zerotrain ended RUN

Exit code 0: completed, or stopped by control.yaml or a callback; 1: failed, or no result is there, as after kill -9;
2: a setting was refused, never try again; 85, or launch.exit_code_when_stopped: a signal has stopped it in order,
saved, try again; 130, 143, 138, 140: a signal has ended it at once.
"""

from collections.abc import Sequence
from pathlib import Path

from zerotrain.commands.frame import exit_code, parser_of
from zerotrain.files.untrusted import UntrustedFileError, printable
from zerotrain.launching import exits, job
from zerotrain.training.result import RESULT_NAME, code_of_stop, read_result


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return the exit code."""
    parser = parser_of("ended", __doc__)
    parser.add_argument("run", type=Path, metavar="RUN", help="the folder of a run")
    options = parser.parse_args(arguments)
    return exit_code(lambda: ended(options.run))


def ended(run: Path) -> int:
    """Print how a run has ended; return its exit code."""
    try:
        result = read_result(run / RESULT_NAME)
    except FileNotFoundError:
        result = None
    except (OSError, UntrustedFileError) as error:
        return _say(run, exits.FAILED, f"its {RESULT_NAME} cannot be read: {error}")
    completed = result is not None and result["status"] == "completed"
    if not completed and (refusal := job.refusal_in(run)) is not None:
        return _say(run, exits.CONFIG_PROBLEM, f"refused: {refusal}")
    if result is None:
        return _say(run, exits.FAILED, f"there is no {RESULT_NAME}: no run has ended here, it runs or was killed")
    code = result["exit_code"]
    if code is None:  # the launcher has not noted it, or another program has written the file
        of_status = {"completed": exits.COMPLETED, "stopped": code_of_stop(result["stopped_by"] or "SIGTERM", None)}
        code = of_status.get(result["status"], exits.FAILED)
    return _say(run, code, result["error"] or result["status"])


def _say(run: Path, code: int, how: str) -> int:
    print(printable(f"{run}: {how}; exit code {code}"), flush=True)
    return code
