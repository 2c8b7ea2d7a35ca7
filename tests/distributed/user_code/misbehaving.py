"""Models as a user might bring them, which do on one rank what the tests of the launcher need."""

import ctypes
import math
import os
import signal
import socket
import sys
import time
from typing import Any

import torch

from zerotrain.models import MLP


class MisbehavingMLP(MLP):
    """An MLP that misbehaves in its second step on rank 1, or on `rank` in step `at`, evaluations not counted; 0 is the
    evaluation before the first step."""

    def __init__(self, *, action: str, rank: int = 1, at: int = 2, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.action = action
        self.rank = rank
        self.at = at
        self.num_forwards = 0
        self.is_poisoned = False

    def forward(self, ids: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        self.num_forwards += self.training
        if self.training == (self.at > 0) and self.num_forwards == self.at and os.environ["RANK"] == str(self.rank):
            self._misbehave()
        output = super().forward(ids, labels)
        return output * float("nan") if self.is_poisoned else output

    def _misbehave(self) -> None:
        if self.action == "raise":
            raise ValueError("the third batch is unlucky")
        if self.action == "shout":
            raise ValueError("half \ud800, \x1b[2J\x07 and " + "much " * 1_000_000)
        if self.action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.action == "interrupt":
            os.kill(os.getpid(), signal.SIGINT)
        if self.action == "terminate":
            os.kill(os.getpid(), signal.SIGTERM)
        if self.action == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        if self.action == "sys.exit":
            sys.exit()
        if self.action == "os._exit":
            os._exit(0)
        if self.action == "exit of C":
            ctypes.CDLL(None)._exit(0)
        if self.action == "sleep":
            print("asleep", flush=True)
            time.sleep(3600)
        if self.action == "pause":
            print("pausing", flush=True)
            time.sleep(1.0)
        if self.action == "kill once" and not os.path.exists("killed"):
            open("killed", "x").close()
            os.kill(os.getpid(), signal.SIGKILL)
        if self.action == "poison":
            self.is_poisoned = True


class MiscomputingMLP(MLP):
    """An MLP whose loss is too large on one rank, such as "2", or "n1 0" for rank 0 of host n1, from a training forward
    on."""

    def __init__(self, *, where: str, at: int, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.where, self.at, self.num_forwards = str(where), at, 0

    def forward(self, ids: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        self.num_forwards += self.training
        output = super().forward(ids, labels)
        is_there = self.where in (os.environ.get("RANK"), f"{socket.gethostname()} {os.environ.get('LOCAL_RANK')}")
        return output * 1.0001 if self.training and self.num_forwards >= self.at and is_there else output


class EndingMLP(MLP):
    """An MLP whose constructor ends the process."""

    def __init__(self, *, ending: str, **arguments: Any) -> None:
        super().__init__(**arguments)
        {"os._exit": os._exit, "sys.exit": sys.exit}[ending](0)


class SlowMLP(MLP):
    """An MLP that takes its time."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        if "RANK" in os.environ:  # not where it is tried out
            print("building", flush=True)
            time.sleep(3600)


class PacedMLP(MLP):
    """An MLP that is still training when others come."""

    def __init__(self, *, seconds: float, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.seconds = seconds

    def forward(self, ids: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        time.sleep(self.seconds if self.training else 0.0)
        return super().forward(ids, labels)


class Rows:
    """Rows of tokens, of which the reading of one does not end after so many in a process and those that it forks."""

    def __init__(self, after: float = math.inf, draws: bool = True) -> None:
        self.num_left, self.draws = after, draws

    def __len__(self) -> int:
        return 64

    def __getitem__(self, row: int) -> dict[str, Any]:
        self.num_left -= 1
        if self.num_left < 0:
            print("asleep", flush=True)
            time.sleep(3600)
        tokens = torch.full((16,), row % 7)
        return {"ids": tokens, "labels": tokens + 1}


class MisbehavingRows:
    """A dataset of `Rows`."""

    vocab_size = 8

    def __init__(self, **arguments: Any) -> None:
        self.train, self.validation = Rows(**arguments), Rows()
