"""A process that gets no more files, threads or memory is told apart from one that has lost others, with what to do."""

import os
import resource
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from zerotrain.comm.whereabouts import files_problem, num_open_files, shortage


@contextmanager
def files_allowed(number: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (number, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_the_files_that_a_rank_needs_are_those_it_has_open_and_some_for_each_rank() -> None:
    with files_allowed(30):
        assert files_problem(2, 10) == ""
        assert files_problem(2, 14) == (
            "a process may open 30 files here, and each rank needs 31; raise it: ulimit -n 1024"
        )
        assert "each rank needs 32" in files_problem(2, 10, at_rank_0=True)
        assert "each rank needs 35" in files_problem(3, 10, at_rank_0=True)


def test_open_files_are_counted() -> None:
    before = num_open_files()
    with open(os.devnull):
        assert num_open_files() == before + 1


def open_too_many() -> None:
    with ExitStack() as opened:
        while True:
            opened.enter_context(open(os.devnull))


def test_a_file_that_cannot_be_opened_is_told_with_the_limit() -> None:
    with files_allowed(num_open_files()), pytest.raises(OSError, match="Too many open files") as raised:
        open_too_many()
    assert shortage(raised.value).endswith("files; raise it: ulimit -n 1024")


@pytest.mark.case(
    "hosts: Ranks of one host",
    "a rank gets no more files, threads or memory",
    "that is the cause, with the limit to raise, and no loss of another",
)
@pytest.mark.parametrize(
    ("error", "says"),
    [
        (RuntimeError("[enforce fail at /gloo/transport/tcp/loop.cc:48] pipe: Too many open files"), "ulimit -n"),
        (RuntimeError("can't start new thread"), "ulimit -u"),
        (RuntimeError("Resource temporarily unavailable"), "ulimit -u"),
        (RuntimeError("errno == 0. Cannot allocate memory"), "ulimit -v"),
        (OSError(12, "Cannot allocate memory"), "ulimit -v"),
    ],
)  # fmt: skip
def test_threads_and_memory_are_told_likewise(error: Exception, says: str) -> None:
    assert says in shortage(error)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("[/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1"),
        BlockingIOError(11, "Resource temporarily unavailable"),
        TimeoutError("no answer within 20 s"),
        ValueError("Too many open files"),
    ],
)
def test_what_is_no_shortage_says_nothing(error: Exception) -> None:
    assert shortage(error) == ""
