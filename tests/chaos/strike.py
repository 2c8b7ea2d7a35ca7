"""A planned kill, and the process in which it strikes: SIGKILL when an exactly named place is passed."""

import json
import os
import signal
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NoReturn

from tests.ranks.processes import HANG_S

FOLDER_VARIABLE = "ZEROTRAIN_CHAOS"
"""Where the kills of a run are planned; not set: none are."""
STRIKES_NAME = "strikes.json"
LAUNCHER = -1
"""In place of a rank: the process that starts them."""
"""A process that is to be killed from another one may just have been started."""


@dataclass(frozen=True)
class Strike:
    """One kill."""

    place: str
    """See `places.PLACES`."""
    victim: str
    """Who is killed when it is passed: "itself", "another" rank, the "parent", or "all" of them."""
    rank: int
    """Whose passing counts; `LAUNCHER` for the process that starts the ranks."""
    step: int
    """Passings count from the beginning of this step, counted from 1; 0: from the start of the process."""
    passing: int
    """Which of them it is, from 1."""
    stage: int
    num_ranks: int


class Striker:
    """This process, as far as it is to be killed or to kill."""

    def __init__(self, folder: Path, strikes: list[Strike], rank: int) -> None:
        self.folder, self.rank, self.step = folder, rank, 0
        self._strikes, self._next = strikes, len(struck_in(folder))
        self._num_passed = 0
        self._process_path(rank).write_text(str(os.getpid()))

    @classmethod
    def of_this_process(cls) -> "Striker | None":
        """By the environment that the ranks inherit."""
        if (folder := os.environ.get(FOLDER_VARIABLE)) is None:
            return None
        planned = json.loads((Path(folder) / STRIKES_NAME).read_text())
        return cls(Path(folder), [Strike(**each) for each in planned], int(os.environ.get("RANK", LAUNCHER)))

    def is_due(self, place: str) -> bool:
        """Called each time a place is passed: whether it is now that the kill comes."""
        if self.rank == LAUNCHER:  # it lives on when ranks are killed
            self._next = len(struck_in(self.folder))
        if self._next >= len(self._strikes):
            return False
        planned = self._strikes[self._next]
        if (planned.place, planned.rank) != (place, self.rank) or self.step < planned.step:
            return False
        self._num_passed += 1
        return self._num_passed == planned.passing

    def strike(self) -> None:
        """Kill whom the plan says. Returns where that is another process."""
        planned = self._strikes[self._next]
        (self.folder / f"struck-{self._next}").touch(exist_ok=False)
        self._next = len(self._strikes)
        others = [rank for rank in range(planned.num_ranks) if rank != self.rank]
        if planned.victim == "another":
            os.kill(self._process(others[0]), signal.SIGKILL)
        if planned.victim in ("all", "parent"):
            processes = [self._process(rank) for rank in others] if planned.victim == "all" else []
            os.kill(self._process(LAUNCHER), signal.SIGKILL)
            for process in processes:
                os.kill(process, signal.SIGKILL)
        if planned.victim in ("all", "itself"):
            kill_itself()

    def passed(self, place: str) -> None:
        """A place is passed."""
        if self.is_due(place):
            self.strike()

    def _process_path(self, rank: int) -> Path:
        return self.folder / f"process-{rank}"

    def _process(self, rank: int) -> int:
        deadline = time.monotonic() + HANG_S
        while time.monotonic() < deadline:
            try:
                return int(self._process_path(rank).read_text())
            except (FileNotFoundError, ValueError):
                time.sleep(0.01)
        raise AssertionError(f"rank {rank} has not begun within {HANG_S} s")


def kill_itself() -> NoReturn:
    """As `kill -9` of this process."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("unreachable")


def struck_in(folder: Path) -> list[Path]:
    """A file for each kill that has struck."""
    return list(folder.glob("struck-*"))


def plan_strikes(folder: Path, strikes: list[Strike]) -> None:
    """Leave them for the processes of a run."""
    (folder / STRIKES_NAME).write_text(json.dumps([asdict(each) for each in strikes]))


def forget_processes(folder: Path) -> None:
    """Before another start."""
    for path in folder.glob("process-*"):
        path.unlink()
