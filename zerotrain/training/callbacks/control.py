"""control.yaml in the run's folder: what an operator asks of a run that is under way.

    stage: 3      # from the next step on, until zero.schedule says otherwise
    save: now
    stop: true    # after this step, saved

Rank 0 looks whether the file has changed, once a step, and tells the others with the number that each step exchanges.
What was done, or why not, replaces what was asked: `answer: ...`. So nothing is done twice. Whatever lies there, and
whoever writes it meanwhile, the run neither waits nor ends.
"""

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.console import Console

from zerotrain.checkpoint.kept import step_name
from zerotrain.comm.ranks.world import World
from zerotrain.files.printable import printable
from zerotrain.files.regular import only_new
from zerotrain.files.untrusted import UntrustedFileError, read_regular, shown
from zerotrain.training.callbacks.stop import SAVE, STOP
from zerotrain.training.figures.report import say

CONTROL_NAME = "control.yaml"
ONE_STAGE = SAVE << 1
"""As many of these as the stage that is asked for, and one more, are in the number of rank 0."""
REQUESTS: dict[str, tuple[str, tuple[Any, ...]]] = {
    "stage": ("0, 1, 2 or 3", (0, 1, 2, 3)),
    "save": ("now", ("now", True)),
    "stop": ("true", (True,)),
}
"""What each may be, in words and as values."""
ALLOWED = "stage: 0 to 3, save: now, stop: true"
MAX_NBYTES = 2**16
MAX_PROBLEMS = 10
"""That are told of one file."""


def stage_asked(signals: Sequence[int]) -> int | None:
    """The stage that rank 0 has asked for in a step; None where it has not."""
    number = signals[0] % STOP // ONE_STAGE
    return number - 1 if number else None


class Control:
    """One run's file. All ranks have one, and call the same; rank 0 alone reads and writes."""

    def __init__(self, path: Path, world: World, console: Console) -> None:
        self._path, self._world, self._console = path, world, console
        self._seen: tuple[int, ...] | None = None
        """What tells that the file has changed, as it was at the last look."""
        self._asked: dict[str, Any] = {}
        self._problems: list[str] = []

    def ask(self) -> int:
        """What rank 0 tells the others with the next step: SAVE, STOP, a stage. A look costs some microseconds."""
        if self._world.rank > 0 or (now := self._state()) is None or now == self._seen:
            return 0
        asked, problems = _requests(self._path)
        if self._state() != now:  # it is being written, or it is gone: the next look sees it whole
            return 0
        self._seen, self._asked, self._problems = now, asked, problems
        number = (self._asked["stage"] + 1) * ONE_STAGE if "stage" in self._asked else 0
        return number + SAVE * ("save" in self._asked) + STOP * ("stop" in self._asked)

    def answer(self, step: int) -> None:
        """What was asked for with this step, counted from 1, is done: say so, in the log and in the file."""
        if not self._asked and not self._problems:
            return
        done = {
            "stage": f"stage: {self._asked.get('stage')} after step {step}",
            "save": f"save: {step_name(step)} is written beside the training",
            "stop": f"stop: after step {step}, saved",
        }
        parts = [done[name] for name in self._asked] + self._problems
        self._asked, self._problems = {}, []
        say(self._console, f"{CONTROL_NAME}: {'; '.join(parts)}")
        quoted = [part.replace("'", "''") for part in parts]
        lines = [f"# {ALLOWED}\n", "answer:\n", *(f"  - '{part}'\n" for part in quoted)]
        if self._state() != self._seen:  # something else is asked for by now, and is not to be lost
            return
        temporary = self._path.with_name(f"{self._path.name}.{os.getpid()}.tmp")
        try:
            with open(temporary, "w", encoding="utf-8", opener=only_new) as file:
                file.write("".join(lines))
            os.replace(temporary, self._path)
        except OSError as error:  # a full disk, or a folder; the log has said it
            with suppress(OSError):
                temporary.unlink()
            say(self._console, f"warning: {self._path} cannot be answered in: {error.strerror}")
        self._seen = self._state()

    def _state(self) -> tuple[int, ...] | None:
        try:
            found = self._path.stat() if self._path.exists() else self._path.lstat()  # of a link that leads nowhere
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size, found.st_ino


def _requests(path: Path) -> tuple[dict[str, Any], list[str]]:
    """(what is asked for, what is wrong with the rest)."""
    from zerotrain.files.plain_yaml import parse_yaml  # pyyaml comes with omegaconf: the engine does without

    try:
        content = parse_yaml(read_regular(path, max_nbytes=MAX_NBYTES))
    except (OSError, UntrustedFileError) as error:
        said = error.strerror if isinstance(error, OSError) else error
        return {}, [f"it cannot be read: {printable(str(said), 500)}; write {ALLOWED}"]
    if not isinstance(content, dict):
        return {}, [] if content is None else [f"it says no key and value; write {ALLOWED}"]
    asked: dict[str, Any] = {}
    problems = []
    for name, value in content.items():
        if name in REQUESTS and any(type(value) is type(each) and value == each for each in REQUESTS[name][1]):
            asked[name] = value
        elif name in REQUESTS:
            problems.append(f"{name}: got {shown(repr(value))}; it must be {REQUESTS[name][0]}")
        elif name != "answer":
            problems.append(f"{shown(name)}: there is no such request; there are {ALLOWED}")
    if len(problems) > MAX_PROBLEMS:
        problems[MAX_PROBLEMS:] = [f"and {len(problems) - MAX_PROBLEMS} more that are wrong"]
    return asked, problems
