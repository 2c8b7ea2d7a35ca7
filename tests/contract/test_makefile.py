"""The Makefile: what can be typed is listed, with a line that says what it does."""

import re
import subprocess
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
MAKEFILE = (REPOSITORY / "Makefile").read_text()


def said_by(*command: str) -> str:
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout


def test_make_alone_lists_every_target_and_no_file_can_hide_one():
    listed = dict(re.findall(r"^  make ([a-z0-9-]+) +(.+)$", said_by("make", "help"), re.MULTILINE))
    targets = set(re.findall(r"^([a-z0-9-]+):", MAKEFILE, re.MULTILINE))
    phony = set(re.search(r"^\.PHONY: (.*)$", MAKEFILE, re.MULTILINE)[1].split())
    assert listed.keys() == phony == targets
    assert {"train", "test", "check", "format", "sweep", "clean", "help"} <= targets
    assert said_by("make") == said_by("make", "help")
