"""What rank 0 prints reaches the terminal and its log; what is drawn for a terminal only stays there."""

import io
import os
import re
import sys
import time
import traceback
from datetime import datetime
from pathlib import Path
from typing import NoReturn

import pytest
from rich.console import Console
from rich.progress import Progress

from zerotrain.launching.worker import TerminalAndFile, open_rank_log


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_a_line_goes_to_both_and_whole_where_it_comes_in_pieces():
    terminal, file = io.StringIO(), io.StringIO()
    both = TerminalAndFile(terminal, file)
    print("loss", end=" ", file=both)
    assert file.getvalue() == ""
    print(2.5, file=both)
    assert terminal.getvalue() == file.getvalue() == "loss 2.5\n"
    assert TerminalAndFile(Terminal(), io.StringIO()).isatty()
    assert not both.isatty()


def test_a_progress_bar_and_colours_are_drawn_on_the_terminal_and_leave_the_log_alone():
    terminal, file = Terminal(), io.StringIO()
    both = TerminalAndFile(terminal, file)
    console = Console(file=both, force_terminal=True, width=80, color_system="standard")
    with Progress(console=console) as progress:
        task = progress.add_task("training", total=2)
        progress.advance(task)
        progress.refresh()
    console.print("[red]done[/red]")
    assert "training" in terminal.getvalue()
    assert "\x1b[31m" in terminal.getvalue()
    assert file.getvalue() == "done\n"


STAMP = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z "


def print_as_rank(folder: Path, rank: int, terminal: int) -> NoReturn:
    """Print what a rank may print, to the log in a folder, and end this process."""
    code = 1
    try:
        os.dup2(terminal, 1)
        os.dup2(terminal, 2)
        sys.stdout, sys.stderr = (open(descriptor, "w", closefd=False) for descriptor in (1, 2))  # noqa: SIM115
        log = open_rank_log(folder, rank)
        print("two\nlines")
        print("in", end=" ")
        print("pieces", "\udc80", end="\n\n")
        sys.stderr.write("10 %\r20 %\r")
        sys.stderr.write("100 %\n")
        try:
            raise ValueError("why")
        except ValueError:
            traceback.print_exc(file=log)
        sys.stdout.flush()
        os.write(1, b"\xff\0 by C++\n")
        print("no end", end="")
        sys.stdout.flush()
        code = 0
    finally:
        os._exit(code)


@pytest.mark.parametrize("rank", [0, 1])
def test_each_line_that_python_prints_to_a_log_begins_with_its_time(tmp_path: Path, rank: int):
    with open(tmp_path / "terminal", "wb") as terminal:
        child = os.fork() or print_as_rank(tmp_path, rank, terminal.fileno())
        assert os.waitpid(child, 0)[1] == 0
    content = (tmp_path / f"{rank}.log").read_bytes().decode(errors="backslashreplace")
    lines = content.split("\n")
    stamped = [re.sub(f"^{STAMP}", "* ", line) for line in lines]
    drawn = ["* 10 %\r20 %\r100 %"] if rank else ["* 100 %"]  # rank 0 has a terminal for that
    traced = ["* Traceback (most recent call last):", "* ValueError: why"]
    assert stamped[:5] == ["* two", "* lines", "* in pieces \\udc80", "* ", *drawn]
    assert [stamped[5], stamped[-3 if rank else -2]] == traced
    assert all(line.startswith("* ") for line in stamped[:-2])
    assert stamped[-2:] == (["\\xff\0 by C++", "* no end"] if rank else ["* ValueError: why", ""])
    times = [line[:24] for line in lines if re.match(STAMP, line)]
    assert times == sorted(times)
    assert abs(datetime.fromisoformat(times[0]).timestamp() - time.time()) < 60
    on_terminal = (tmp_path / "terminal").read_bytes()
    assert (b"two\nlines\nin pieces " in on_terminal) is (rank == 0)
    assert not re.search(STAMP.encode(), on_terminal)
