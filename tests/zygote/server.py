"""Runs Python programs in children of one process that has imported torch and zerotrain: 0.3 s each in place of 3 s.

The program is the real one from its first line, in a session of its own, with the environment, the search path, the
folder and the files that it was given; only the imports are there already. For tests that are not about these.

Listens at a socket, reads a JSON object a line and answers with one value a line. `{"arguments", "folder",
"environment", "stdout", "stderr", "tells_programs"}` starts `python ARGUMENTS`, a file or `-m module`, and answers with
its pid; `{"pid"}` answers with the exit code of one that was started, or null while it runs. A `stand_in.py`, which
another has started as a Python, has a connection of its own, is told the pid and at the end the exit code, and takes
the program along where it is killed.
"""

import ctypes
import gc
import json
import os
import runpy
import selectors
import signal
import socket
import sys
import tempfile
import traceback
import weakref
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import NoReturn, TextIO

REPOSITORY = Path(__file__).resolve().parents[2]
CLOSED_PIPE = "a pipe that nobody reads"
MARK = "ZEROTRAIN_TEST_COMMAND"
"""A variable that tells the processes of one command, in the environment that the system shows of a process."""
NO_MARK = "0" * 32
IMPORTED = (
    "hydra.core.plugins",
    "torch._dynamo",
    "torch.distributed.run",
    "zerotrain.commands.evaluate",
    "zerotrain.commands.export_folder",
    "zerotrain.saved.text_model",
    "zerotrain.commands.inspection",
    "zerotrain.commands.prepare",
    "zerotrain.data",
    "zerotrain.launching.command",
    "zerotrain.launching.task",
    "zerotrain.launching.rank_process",
    "zerotrain.models",
    "zerotrain.training",
)
"""What the commands import on their way. Nothing here makes a thread, which a fork would lose."""
LARGE = 1 << 21
MADV_COLLAPSE = 25
"""Linux has it since 6.1. Elsewhere it is an error, and nothing is changed."""
OF_HUGGING_FACE = ("peft", "transformers.modeling_utils", "transformers.generation")
"""Imported too, where they are installed: 2 s of each command with such a model."""


def start(request: dict) -> int:
    """The pid of a child that becomes the program."""
    pid = os.fork()
    if pid == 0:
        become(request)
    return pid


def become(request: dict) -> NoReturn:
    """Turn this child into the program, and end as Python ends."""
    code = 1
    try:
        os.setsid()
        weakref.finalize._registry.clear()  # type: ignore[attr-defined]  # or this end removed folders of the other's
        signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored, where a shell began all in the background
        os.chdir(request["folder"])
        set_environment(request["environment"])
        tempfile.tempdir = None  # noted before TMPDIR was that of this program
        for descriptor, name in enumerate([request.get("stdin", "/dev/null"), request["stdout"], request["stderr"]]):
            file = name if isinstance(name, int) else opened(name)
            os.dup2(file, descriptor)
            os.close(file)
        sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w", 1, errors="backslashreplace")  # noqa: SIM115
        sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr
        if request["tells_programs"]:
            sys.addaudithook(tell_of_programs)
        run(request["arguments"])
        code = 0
    except SystemExit as ending:
        code = ending.code if isinstance(ending.code, int) else int(ending.code is not None)
        if isinstance(ending.code, str):
            print(ending.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        import_module("zerotrain.launching.exits").end_as_python(code)


def set_environment(environment: dict[str, str]) -> None:
    """The environment as Python, the libraries and the system see it, and the search path that follows from it."""
    before = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    os.environ.clear()
    os.environ.update(environment)
    if MARK in environment:
        write_mark(environment[MARK])
    of_python = [each for each in sys.path[1:] if each not in before]
    now = environment.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[1:] = [*(each for each in now if each), *of_python]


def write_mark(mark: str) -> None:
    """Write it where the system looks, into the environment that this process began with."""
    first, last = (int(each) for each in open("/proc/self/stat").read().rpartition(")")[2].split()[47:49])  # noqa: SIM115
    place = ctypes.string_at(first, last - first).index(f"{MARK}=".encode()) + len(f"{MARK}=")
    ctypes.memmove(first + place, mark.encode().ljust(len(NO_MARK))[: len(NO_MARK)], len(NO_MARK))


def run(arguments: list[str]) -> None:
    """`python ARGUMENTS`."""
    if arguments[0] == "-c":
        sys.path[0] = ""
        sys.argv = ["-c", *arguments[2:]]
        exec(arguments[1], vars(import_module("__main__")))
    elif arguments[0] == "-m":
        sys.path[0] = os.getcwd()
        sys.argv = arguments[1:]
        if not hasattr(sys.modules.get(arguments[1]), "__path__"):
            sys.modules.pop(arguments[1], None)  # or runpy would warn of it
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = os.path.dirname(os.path.abspath(arguments[0]))
        sys.argv = list(arguments)
        runpy.run_path(os.path.abspath(arguments[0]), run_name="__main__")


def tell_of_programs(event: str, arguments: tuple) -> None:
    if event in ("os.system", "os.exec", "os.posix_spawn", "subprocess.Popen"):
        print(f"started: {event} {arguments!r}"[:500], file=sys.stderr)


def opened(name: str) -> int:
    """A file to write to, or CLOSED_PIPE."""
    return closed_pipe() if name == CLOSED_PIPE else os.open(name, os.O_RDWR | os.O_CREAT, 0o644)


def closed_pipe() -> int:
    """The end of a pipe to write into, of which the other end is gone."""
    reader, writer = os.pipe()
    os.close(reader)
    return writer


def code_of(pid: int) -> int | None:
    ended, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if ended else None


def get_ready() -> None:
    """Import all that is imported once."""
    gc.disable()
    for name in IMPORTED:
        import_module(name)
    with suppress(ModuleNotFoundError):
        for name in OF_HUGGING_FACE:
            import_module(name)
    import_module("torch").set_num_threads(1)
    import_module("hydra.core.plugins").Plugins.instance()  # looks through all installed packages once
    compose_once()
    gc.freeze()
    gc.enable()
    take_large_pages()


def compose_once() -> None:
    """Compose a config: Hydra and OmegaConf keep what they have learned of their grammars, and each program inherits
    it, which spares 0.1 s of a run of two ranks."""
    hydra, compose = import_module("hydra"), import_module("zerotrain.config.compose")
    compose.register_schema()
    with hydra.initialize_config_dir(config_dir=str(REPOSITORY / "conf"), version_base="1.3"):
        composed = hydra.compose("train", ["model=mlp", "train.max_steps=3", "zero.bucket_mb=0.25", "+optimizer.a='b'"])
    compose.to_config(composed)


def take_large_pages() -> None:
    """Let this process lie in pages of 2 MiB, where the system has them: a fork and its end copy and clear an entry for
    each page, which takes 47 ms with pages of 4 KiB and 16 ms with these."""
    libc = ctypes.CDLL(None)
    for place, access, _, _, _, *name in map(str.split, open("/proc/self/maps")):  # noqa: SIM115
        first, end = (int(each, 16) // LARGE for each in place.split("-"))
        if access == "rw-p" and name in ([], ["[heap]"]):
            for page in range(first + 1, end):  # one by one: a page that cannot be ends the call
                libc.madvise(ctypes.c_void_p(page * LARGE), ctypes.c_size_t(LARGE), MADV_COLLAPSE)


class Connections:
    """Those of clients, and those of stand-ins, each of which brings the files of its program along."""

    def __init__(self, path: str, selector: selectors.BaseSelector) -> None:
        self._selector = selector
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(path)
        listener.listen()
        selector.register(listener, selectors.EVENT_READ, lambda: self._accept(listener))

    def _accept(self, listener: socket.socket) -> None:
        connection, _ = listener.accept()
        _, descriptors, _, _ = socket.recv_fds(connection, 1, 3)
        file = connection.makefile("r")
        if descriptors:
            self._stand_in(connection, json.loads(file.readline()), descriptors)
        else:
            self._selector.register(connection, selectors.EVENT_READ, lambda: self._answer(connection, file))

    def _answer(self, connection: socket.socket, file: TextIO) -> None:
        """One request of a client."""
        if line := file.readline():
            request = json.loads(line)
            answer = code_of(request["pid"]) if "pid" in request else start(request)
            connection.sendall(json.dumps(answer).encode() + b"\n")
        else:
            self._selector.unregister(connection)
            connection.close()

    def _stand_in(self, connection: socket.socket, request: dict, descriptors: list[int]) -> None:
        request |= dict(zip(("stdin", "stdout", "stderr"), descriptors, strict=True), tells_programs=False)
        pid = start(request)
        for descriptor in descriptors:
            os.close(descriptor)
        tell(connection, pid)
        ended = os.pidfd_open(pid)
        self._selector.register(connection, selectors.EVENT_READ, lambda: kill(ended))
        self._selector.register(ended, selectors.EVENT_READ, lambda: self._tell(connection, pid, ended))

    def _tell(self, connection: socket.socket, pid: int, ended: int) -> None:
        """The program has ended: say so to its stand-in."""
        for each in (connection, ended):
            self._selector.unregister(each)
        os.close(ended)
        with connection:
            tell(connection, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


def tell(stand_in: socket.socket, number: int) -> None:
    with suppress(OSError):  # it was killed, and hears nothing
        stand_in.send(b"%d\n" % number)


def kill(pidfd: int) -> None:
    with suppress(OSError):  # it has just ended
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)


def main() -> None:
    get_ready()
    selector = selectors.DefaultSelector()
    Connections(sys.argv[1], selector)
    selector.register(sys.stdin, selectors.EVENT_READ, sys.exit)  # who has started this has ended
    print(flush=True)
    while True:
        for key, _ in selector.select():
            key.data()


if __name__ == "__main__":
    main()
