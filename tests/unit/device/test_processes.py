"""A child that computes beside its parent: its value, its errors, its end; and none where a fork is not safe.

Each is tried in a process of its own, since one with pytest's threads may not fork."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.ranks.processes import HANG_S

BEGIN = """
import os, signal, sys, threading, time
from pathlib import Path
from zerotrain.device.processes import compute_in_child, may_fork
from zerotrain.errors import ConfigError

here = os.getpid()

def children():
    return Path(f"/proc/{here}/task/{here}/children").read_text().split()

assert may_fork()
"""
END = """
assert children() == []
assert len(os.listdir("/proc/self/fd")) == 4, os.listdir("/proc/self/fd")
"""


def tried(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", BEGIN + code, *arguments], capture_output=True, text=True)


OF_A_CHILD = """
with compute_in_child(os.getpid) as told:
    assert len(children()) == 1
    assert told() != here
"""
LARGER_THAN_A_PIPE = """
with compute_in_child(lambda: "a" * 10**7) as told:
    assert told() == "a" * 10**7
"""
AN_ERROR = """
def compute():
    raise ConfigError("one: line", "another: line")

try:
    with compute_in_child(compute) as told:
        told()
except ConfigError as error:
    assert list(error.problems) == ["one: line", "another: line"]
else:
    raise AssertionError
"""
A_KILLED_CHILD = """
def compute():
    if os.getpid() != here:
        os.kill(os.getpid(), signal.SIGKILL)
    return 7

with compute_in_child(compute) as told:
    assert told() == 7
"""
NOBODY_WAITS = """
try:
    with compute_in_child(lambda: time.sleep(1000)):
        raise KeyboardInterrupt
except KeyboardInterrupt:
    pass
"""
A_THREAD = """
over = threading.Event()
thread = threading.Thread(target=over.wait)
thread.start()
assert not may_fork()
with compute_in_child(os.getpid) as told:
    assert children() == []
    assert told() == here
over.set()
thread.join()
"""
BESIDE_THE_STORE = """
import warnings
warnings.simplefilter("always")  # Python 3.12 warns of a fork beside a thread
named, over = threading.Event(), threading.Event()

def serve():
    Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text("pt_tcpstore_uv")
    named.set()
    over.wait()

thread = threading.Thread(target=serve)
thread.start()
named.wait()
with compute_in_child(os.getpid) as told:
    assert len(children()) == 1
    assert told() != here
over.set()
thread.join()
"""
CASES = {
    "of a child": OF_A_CHILD,
    "larger than a pipe": LARGER_THAN_A_PIPE,
    "an error": AN_ERROR,
    "a killed child": A_KILLED_CHILD,
    "nobody waits": NOBODY_WAITS,
    "a thread": A_THREAD,
    "beside the store": BESIDE_THE_STORE,
}


@pytest.mark.parametrize("code", CASES.values(), ids=CASES)
def test_what_is_computed_beside_is_told_and_no_child_and_no_file_is_left(code: str):
    started_s = time.monotonic()
    done = tried(code + END)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert time.monotonic() - started_s < HANG_S


def test_what_was_printed_before_is_printed_once():
    done = tried("sys.stdout.write('once')\nwith compute_in_child(os.getpid) as told: told()")
    assert (done.stdout, done.stderr) == ("once", "")


def test_a_child_ends_with_its_parent_however_that_ends(tmp_path: Path):
    code = """
def compute():
    Path(sys.argv[1]).write_text(str(os.getpid()))
    time.sleep(1000)

with compute_in_child(compute):
    while not os.path.exists(sys.argv[1]) or not Path(sys.argv[1]).read_text():
        time.sleep(0.01)
    os.kill(here, signal.SIGKILL)
"""
    tried(code, str(tmp_path / "pid"))
    child, deadline_s = int((tmp_path / "pid").read_text()), time.monotonic() + HANG_S
    while Path(f"/proc/{child}").exists() and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert not Path(f"/proc/{child}").exists()
