"""control.yaml in the run's folder: what an operator asks of a run that is under way.

    stage: 3      # from the next step on, until zero.schedule says otherwise
    save: now
    stop: true    # after this step, saved

Rank 0 looks whether the file has changed, once a step, and tells the others with the number that each step exchanges.
What was done, or why not, replaces what was asked: `answer: ...`. So nothing is done twice.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from zerotrain.checkpoint.kept import step_name
from zerotrain.comm.world import World
from zerotrain.training.report import say
from zerotrain.training.stop import SAVE, STOP

CONTROL_NAME = "control.yaml"
ONE_STAGE = SAVE << 1
"""As many of these as the stage that is asked for, and one more, are in the number of rank 0."""
NUM_STAGES = 4
ALLOWED = "stage: 0 to 3, save: now, stop: true"


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
        self._seen = now
        self._asked, self._problems = _requests(self._path)
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
        lines = [f"# {ALLOWED}\n", "answer:\n", *(f"  - {_quoted(part)}\n" for part in parts)]
        temporary = self._path.with_name(f"{self._path.name}.{os.getpid()}.tmp")
        try:
            temporary.write_text("".join(lines))
            os.replace(temporary, self._path)
        except OSError as error:  # a full disk; the log has said it
            temporary.unlink(missing_ok=True)
            say(self._console, f"warning: {self._path} cannot be answered in: {error.strerror}")
        self._seen = self._state()

    def _state(self) -> tuple[int, ...] | None:
        try:
            found = os.stat(self._path)
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size, found.st_ino


def _requests(path: Path) -> tuple[dict[str, Any], list[str]]:
    """(what is asked for, what is wrong with the rest)."""
    import yaml  # which comes with omegaconf: the engine and its benchmarks do without

    try:
        content = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        said = " ".join(str(error).split())
        return {}, [f"it cannot be read: {said}; write {ALLOWED}"]
    if not isinstance(content, dict):
        return {}, [] if content is None else [f"it says no key and value; write {ALLOWED}"]
    asked: dict[str, Any] = {}
    problems = []
    for name, value in content.items():
        if name == "answer":
            continue
        if name == "stage" and type(value) is int and value in range(NUM_STAGES):
            asked["stage"] = value
        elif name == "stage":
            problems.append(f"stage: got {value!r}; it must be 0, 1, 2 or 3")
        elif name == "save" and value in ("now", True):
            asked["save"] = True
        elif name == "stop" and value is True:
            asked["stop"] = True
        elif name in ("save", "stop"):
            problems.append(f"{name}: got {value!r}; it must be {'now' if name == 'save' else 'true'}")
        else:
            problems.append(f"{name}: there is no such request; there are {ALLOWED}")
    return asked, problems


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
