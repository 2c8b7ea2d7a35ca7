"""Loops of one's own, as plain processes start them: `World.from_environment`, then `build_engine`."""

import functools
import multiprocessing as mp
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from typing import Any
from unittest.mock import patch

from tests.ranks.processes import HANG_S, PRELOADED

KILLED, MET = "killed", "met"


def nothing(rank: int) -> None:
    """Prepare nothing."""


@dataclass(frozen=True)
class Disturbance:
    """What is done to the ranks of a loop."""

    prepare: Callable[[int], None] = nothing
    """Called in each process, with its rank."""
    spare_files: int | None = None
    """A process may open so many beside those it has open."""


def run_loop(size: int, disturbance: Disturbance, kill: tuple[int, float] | None = None) -> list[str]:
    """How each rank ended: "completed", "killed", or what was raised.

    Args:
        kill: (a rank, seconds after all have come), by kill -9.

    Raises:
        AssertionError: one does not end.
    """
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    with patch.dict(os.environ, PYTHONPATH=path, PYTHONSAFEPATH="1"):  # as `run_ranks` starts it
        forkserver.ensure_running()
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    pipes, processes = [], []
    for rank in range(size):
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_rank_main, args=(theirs, rank, size, port, disturbance), daemon=True)
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    try:
        if kill is not None:
            assert pipes[kill[0]].recv() == MET
            time.sleep(kill[1])
            processes[kill[0]].kill()
        return [_ending(pipe, processes[rank], rank) for rank, pipe in enumerate(pipes)]
    finally:
        for process in processes:
            process.kill()
            process.join()


def _ending(pipe: Connection, process: Any, rank: int) -> str:
    said = ""
    try:
        while True:
            assert pipe.poll(HANG_S), f"rank {rank} does not end"
            said = pipe.recv()
    except EOFError:
        process.join()
        return KILLED if process.exitcode == -signal.SIGKILL else f"{said} (exit code {process.exitcode})"


def _rank_main(pipe: Connection, rank: int, size: int, port: int, disturbance: Disturbance) -> None:
    import torch
    from torch import nn

    import zerotrain
    from zerotrain.comm import world
    from zerotrain.comm.whereabouts import num_open_files

    torch.set_num_threads(1)
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(size)}
    os.environ.update(address, RANK=str(rank), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(size))
    disturbance.prepare(rank)
    if disturbance.spare_files is not None:
        allowed = num_open_files() + disturbance.spare_files
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, allowed))
    meet = world.meet

    def meet_and_tell(*arguments: Any, **more: Any) -> Any:
        met = meet(*arguments, **more)
        pipe.send(MET)
        return met

    world.meet = meet_and_tell
    try:
        with zerotrain.World.from_environment(device="cpu") as joined:
            model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
            engine = zerotrain.build_engine(model, optimizer=functools.partial(torch.optim.SGD, lr=1e-3), world=joined)
            for _ in range(100):
                engine.backward(engine(torch.ones(2, 64)).square().mean())
                engine.step()
        said = "completed"
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    pipe.send(said)
    pipe.close()
    os._exit(0 if said == "completed" else 1)  # the group of a rank that is gone has threads of gloo still
