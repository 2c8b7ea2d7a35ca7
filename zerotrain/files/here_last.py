"""The folder where the user is: it must be there, and what lies in it stands for nothing that is installed.

A command that reads what others have written calls both before it imports anything else. `python -m` looks for modules
there first, and a `torch.py` beside a checkpoint would stand for torch. From here on it looks there last: what is
installed cannot be replaced, and modules of the user's own are still found. This file stays apart: it imports nothing
that could lie in that folder.
"""

import os  # as sys, there before the first line of ours
import sys


def require_here() -> None:
    """Make sure that the folder where the user is has not been removed. Ends the process with a line and exit code 2
    where it has."""
    try:
        os.getcwd()
    except FileNotFoundError:
        print("the working directory no longer exists; change to one that does", file=sys.stderr)
        sys.exit(2)


def look_here_last() -> None:
    """Move the folder where the user is to the end of what is searched, where `python -m` has put it at the front."""
    command = getattr(sys.modules["__main__"], "__spec__", None)
    if command is None or not command.name.startswith("zerotrain.") or sys.flags.safe_path:
        return
    if sys.path and os.path.realpath(sys.path[0]) == os.path.realpath(""):
        sys.path.append(sys.path.pop(0))
