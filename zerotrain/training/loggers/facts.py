"""What a run is: its settings, and the code and the machine that it runs on."""

import platform
import shlex
import subprocess
import sys
from contextlib import suppress

from zerotrain.checkpoint.manifest import versions
from zerotrain.device.kinds import device_of
from zerotrain.training.callback import Run

GIT_S = 10.0
"""Seconds that git may take."""


def facts_of(run: Run) -> dict[str, str]:
    """The command, versions, device, host and git revision of a run, each a text."""
    overrides = run.result.overrides
    command = sys.argv if overrides is None else ["python", "-m", "zerotrain", *overrides]
    facts = {
        "command": shlex.join(command),
        "folder": str(run.folder),
        "config_hash": run.result.config_hash,
        "git_revision": _git_revision(),
        "host": platform.node(),
        "device": device_of(run.world.device).name,
        "ranks": run.world.size,
    }
    facts |= versions()
    return {name: str(value) for name, value in facts.items() if value is not None}


def _git_revision() -> str | None:
    """Of the repository in which the run was started; None where there is none."""
    with suppress(OSError, subprocess.SubprocessError):
        command = ["git", "rev-parse", "HEAD"]
        told = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=GIT_S)
        return told.stdout.strip() or None
    return None
