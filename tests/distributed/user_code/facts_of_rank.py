"""A model that writes down, in a rank, what its process has."""

import json
import logging
import os
import random
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig

from zerotrain.models import MLP

_SIGNALS = ("SIGHUP", "SIGQUIT", "SIGCHLD", "SIGPIPE", "SIGALRM", "SIGXCPU")
_OWN = ("ZEROTRAIN_STORE", "ZEROTRAIN_TEST_COMMAND", "OPENBLAS_NUM_THREADS")


def facts() -> dict[str, Any]:
    """The program; what is the same in each rank, however it was started; and numbers drawn at random."""
    opened = [f"/proc/self/fd/{each}" for each in os.listdir("/proc/self/fd")]
    files = [os.readlink(each) for each in opened if os.path.exists(each)]
    umask = os.umask(0o77)
    os.umask(umask)
    main = sys.modules["__main__"].__spec__
    same = {
        "argv": [Path(each).name for each in sys.argv],
        "main": main and main.name.rpartition(".")[-1],
        "folder": os.getcwd(),
        "path": list(dict.fromkeys(each for each in sys.path if os.path.isdir(each))),
        "umask": umask,
        "handlers": {name: str(signal.getsignal(getattr(signal, name))) for name in _SIGNALS},
        "threads": torch.get_num_threads(),
        "seed": torch.initial_seed(),
        "log handlers": len(logging.root.handlers),
        "hydra": [GlobalHydra.instance().is_initialized(), HydraConfig.initialized()],
        "leads a session": os.getsid(0) == os.getpid(),
        "environment": {name: value for name, value in os.environ.items() if name not in _OWN},
        "standard files": [stream and stream.fileno() for stream in (sys.__stdin__, sys.__stdout__, sys.__stderr__)],
        "files of the launcher": [name for name in files if "inherited" in name or name.endswith(".lock")],
        "is main thread": threading.current_thread() is threading.main_thread(),
    }
    program = Path("/proc/self/cmdline").read_text().split("\0")[1]
    return {"program": program, "same": same, "drawn": [random.random(), float(np.random.rand())]}


class Probe(MLP):
    """A model that leaves the facts in the folder FACTS, in a rank."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        if "RANK" in os.environ:
            Path(os.environ["FACTS"], os.environ["RANK"]).write_text(json.dumps(facts()))
