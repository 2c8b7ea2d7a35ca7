"""control.yaml in the run's folder: an operator's requests to a run that is under way.

    stage: 3      # from the next step on, until zero.schedule says otherwise
    save: now
    stop: true    # after this step, saved

Rank 0 looks whether the file has changed, once a step, and tells the others with the number that each step exchanges.
An answer (what was done, or why not) replaces the request: `answer: ...`. So nothing is done twice. Whatever the file
holds, and whoever writes it meanwhile, the run neither waits nor ends.
"""

from pathlib import Path
from typing import Any

from rich.console import Console

from zerotrain.checkpoint.folder import step_name
from zerotrain.comm.world import World
from zerotrain.engine.results import TrainStepResult
from zerotrain.files.lock import whole
from zerotrain.files.untrusted import UntrustedFileError, printable, read_regular, shown
from zerotrain.training.callback import Callback, Run
from zerotrain.training.figures.report import say
from zerotrain.training.request import ASKED, Request

CONTROL_NAME = ASKED
REQUESTS: dict[str, tuple[str, tuple[Any, ...]]] = {
    "stage": ("0, 1, 2 or 3", (0, 1, 2, 3)),
    "save": ("now", ("now", True)),
    "stop": ("true", (True,)),
}
"""Allowed values of each request, in words and as values."""
ALLOWED = "stage: 0 to 3, save: now, stop: true"
MAX_NBYTES = 2**16
MAX_PROBLEMS = 10
"""That are told of one file."""


class Control(Callback):
    """One run's file. All ranks have one, and call the same; rank 0 alone reads and writes."""

    def __init__(self, path: Path, world: World, console: Console) -> None:
        self._path, self._world, self._console = path, world, console
        self._seen: tuple[int, ...] | None = None
        """The file's time, size and inode at the last look: a change shows in them."""
        self._asked: dict[str, Any] = {}
        self._problems: list[str] = []

    def ask(self, run: Run) -> Request:
        """See `Callback.ask`."""
        return self.look()

    def after_step(self, run: Run, outcome: TrainStepResult) -> None:
        """See `Callback.after_step`."""
        self.answer(run.step)

    def look(self) -> Request:
        """The requests in the file, on rank 0. A look costs some microseconds."""
        if self._world.rank > 0 or (now := self._state()) is None or now == self._seen:
            return Request()
        asked, problems = _requests(self._path)
        if self._state() != now:  # it is being written, or it is gone: the next look sees it whole
            return Request()
        self._seen, self._asked, self._problems = now, asked, problems
        return Request(stage=asked.get("stage"), save="save" in asked, stop="stop" in asked and CONTROL_NAME)

    def answer(self, step: int) -> None:
        """The requests of this step, counted from 1, are done: say so, in the log and in the file."""
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
        try:
            with whole(self._path) as file:
                file.write("".join(lines).encode())
        except OSError as error:  # a full disk, or a folder; the log has said it
            say(self._console, f"warning: the answer cannot be written to {self._path}: {error.strerror}")
        self._seen = self._state()

    def _state(self) -> tuple[int, ...] | None:
        try:
            found = self._path.stat() if self._path.exists() else self._path.lstat()  # of a link that leads nowhere
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size, found.st_ino


def _requests(path: Path) -> tuple[dict[str, Any], list[str]]:
    """(what is asked for, what is wrong with the rest)."""
    from zerotrain.files.untrusted import parse_yaml  # pyyaml comes with omegaconf: the engine does without

    try:
        content = parse_yaml(read_regular(path, max_nbytes=MAX_NBYTES))
    except (OSError, UntrustedFileError) as error:
        said = error.strerror if isinstance(error, OSError) else error
        return {}, [f"it cannot be read: {printable(str(said), 500)}; write {ALLOWED}"]
    if not isinstance(content, dict):
        return {}, [] if content is None else [f"it has no key and value; write {ALLOWED}"]
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
