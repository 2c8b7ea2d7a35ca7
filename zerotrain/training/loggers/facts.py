"""The code and the machine that a run runs on."""

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
MAX_CHANGES = 2**20
"""Characters of a diff that is kept."""


def facts_of(run: Run) -> dict[str, str]:
    """The command, versions, device, host and git revision of a run, each a text."""
    overrides = run.result.overrides
    command = sys.argv if overrides is None else ["python", "-m", "zerotrain", *overrides]
    facts = {
        "command": shlex.join(command),
        "folder": str(run.folder),
        "config_hash": run.result.config_hash,
        "git_revision": _git("rev-parse", "HEAD").strip() or None,
        "host": platform.node(),
        "device": device_of(run.world.device).name,
        "ranks": run.world.size,
    }
    facts |= versions()
    return {name: str(value) for name, value in facts.items() if value is not None}


def uncommitted_changes() -> str:
    """The diff from the git revision to the tracked files as they are, without binary ones; empty where there is none,
    and cut at MAX_CHANGES."""
    return _git("diff", "HEAD", "--no-ext-diff", "--no-textconv", "--no-color")[:MAX_CHANGES]


def _git(*arguments: str) -> str:
    """The answer of git about the folder in which the run was started; empty where it has none."""
    with suppress(OSError, subprocess.SubprocessError):
        command = ["git", *arguments]
        told = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=GIT_S)
        return told.stdout.decode(errors="replace") if told.returncode == 0 else ""
    return ""
