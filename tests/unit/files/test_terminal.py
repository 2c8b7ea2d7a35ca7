"""Output that cannot be written, in processes of their own: what they print goes where a shell sends it."""

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from zerotrain.files.terminal import LastingStream, package

COMMAND = """
import sys
from zerotrain.files.terminal import run_command
def main():
    for number in range({num_lines}):
        print("line", number)
    print("done", file=sys.stderr)
    {end}
run_command(main, only_prints={only_prints})
"""


def ended(
    redirected: str, *, end: str = "return 0", only_prints: bool = False, num_lines: int = 100_000
) -> tuple[int, str]:
    """(exit code, stderr) of a command of many lines."""
    command = COMMAND.format(end=end, only_prints=only_prints, num_lines=num_lines)
    line = f'"$0" -c "$1" {redirected}'
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    process = subprocess.run(
        ["bash", "-c", line, sys.executable, command], env=buffered, capture_output=True, text=True
    )
    return process.returncode, process.stderr


def test_a_full_disk_is_told_at_the_end_and_is_a_failure() -> None:
    said = "standard output cannot be written: No space left on device\n"
    assert ended("> /dev/full") == (1, f"done\n{said}")
    assert ended("> /dev/full", only_prints=True, num_lines=1) == (1, f"done\n{said}")
    assert ended("> /dev/full", end="sys.exit('a problem')") == (1, f"done\na problem\n{said}")
    assert ended("> /dev/full", end="return 2") == (2, f"done\n{said}")
    assert ended("> /dev/full 2>&1")[0] == 1
    assert ended("2> /dev/full > /dev/null") == (0, "")


def test_nobody_who_reads_ends_what_only_prints_and_nothing_else() -> None:
    assert ended("| head -1 > /dev/null; exit ${PIPESTATUS[0]}") == (0, "done\n")
    assert ended("| head -1 > /dev/null; exit ${PIPESTATUS[0]}", only_prints=True) == (141, "")
    assert ended(">&-") == ended(">&-", only_prints=True) == (0, "done\n")


def test_ctrl_c_is_no_traceback() -> None:
    assert ended("> /dev/null", end="raise KeyboardInterrupt") == (130, "done\n")


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_what_the_terminal_has_no_character_for_is_escaped(stream: str, tmp_path: Path) -> None:
    command = (
        "from zerotrain.files.terminal import run_command; import sys\n"
        f"run_command(lambda: print('\\ud800 \\u20ac', file=sys.{stream}))"
    )
    with (tmp_path / "said").open("w") as file:
        environment = os.environ | {"PYTHONIOENCODING": "ascii"}
        process = subprocess.run([sys.executable, "-c", command], env=environment, **{stream: file})
    assert (process.returncode, (tmp_path / "said").read_text()) == (0, "\\ud800 \\u20ac\n")


def test_what_stands_for_a_stream_ends_quietly_after_the_stream() -> None:
    stream = io.StringIO()
    stand_in = LastingStream(stream)
    stream.close()
    stand_in.close()  # by Python, once nobody uses it


# A package that is not installed is named, with what installs it.


def test_one_that_is_not_is_told_with_what_installs_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    said = r"^data.path: a.parquet needs pyarrow, which is not installed; pip install 'zerotrain\[parquet\]'$"
    with pytest.raises(ImportError, match=said):
        package("pyarrow.parquet", extra="parquet", needed_by="data.path: a.parquet")
