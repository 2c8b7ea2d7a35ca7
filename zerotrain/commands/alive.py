"""`zerotrain alive RUN --within 300s`: whether a run has begun a step within this time.

For a probe of Kubernetes, or a line of cron. Rank 0 touches RUN/alive when the run enters a phase, such as building the
model, and with each step, at most once a second. Give more time than the longest evaluation or compilation takes.

  zerotrain alive RUN --within 300s

Exit code 0: it has; 1: it has not, or there is no such run; 2: an argument is wrong, one line.
"""

import time
from collections.abc import Sequence
from pathlib import Path

from zerotrain.commands.frame import exit_code, parser_of
from zerotrain.config.schema import Rhythm
from zerotrain.errors import ConfigError
from zerotrain.files.untrusted import duration, printable
from zerotrain.launching import exits, presence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return the exit code."""
    parser = parser_of("alive", __doc__)
    parser.add_argument("run", type=Path, metavar="RUN", help="the folder of a run")
    parser.add_argument("--within", default="300s", metavar="TIME", help="such as 300s, the default, 15m or 2h")
    options = parser.parse_args(arguments)
    return exit_code(lambda: alive(options.run, options.within))


def alive(run: Path, within: str) -> int:
    """Print when a run last gave a sign of life; return the exit code.

    Raises:
        ConfigError: `within` is no time.
    """
    limit = Rhythm.read(within)
    if limit is None or limit.unit != "seconds":
        raise ConfigError(f"--within: got {within}; it must be a time such as 300s, 15m or 2h")
    try:
        age_s = max(0.0, time.time() - (run / presence.ALIVE).lstat().st_mtime)
    except OSError as error:
        print(printable(f"{run}: no sign of life: {presence.ALIVE}: {error.strerror}"))
        return exits.FAILED
    print(printable(f"{run}: the last sign of life was {duration(age_s)} ago"))
    return exits.COMPLETED if age_s <= limit.number else exits.FAILED
