"""Exit codes of launch.py."""

import signal

COMPLETED = 0
FAILED = 1
CONFIG_PROBLEM = 2


def of_signal(signum: int) -> int:
    """What a shell shows for a command that a signal has ended: 130 for Ctrl-C."""
    return 128 + signal.Signals(signum).value
