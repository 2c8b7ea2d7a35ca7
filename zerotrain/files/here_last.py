"""Imported before all else by a command that reads what others have written: the folder where the user is may be one.

`python -m` looks for modules there first, and a `torch.py` beside a checkpoint would stand for torch. From here on it
looks there last: what is installed cannot be replaced, and modules of the user's own are still found.
"""

import os  # as sys, there before the first line of ours
import sys


def look_here_last() -> None:
    """Move the folder where the user is to the end of what is searched, where `python -m` has put it at the front."""
    command = getattr(sys.modules["__main__"], "__spec__", None)
    if command is None or not command.name.startswith("zerotrain.") or sys.flags.safe_path:
        return
    if sys.path and os.path.realpath(sys.path[0]) == os.path.realpath(""):
        sys.path.append(sys.path.pop(0))


look_here_last()
