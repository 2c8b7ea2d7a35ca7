"""The Makefile: what can be typed is listed, with a line that says what it does."""

import re
import subprocess
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
MAKEFILE = (REPOSITORY / "Makefile").read_text()


def test_make_help_lists_every_target():
    process = subprocess.run(["make", "help"], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    listed = dict(re.findall(r"^  make ([a-z-]+) +(.+)$", process.stdout, re.MULTILINE))
    targets = set(re.findall(r"^([a-z-]+):", MAKEFILE, re.MULTILINE))
    assert listed.keys() == targets
    assert {"train", "test", "check", "format", "sweep", "clean", "help"} <= targets


def test_no_target_can_be_hidden_by_a_file_of_its_name():
    phony = set(re.search(r"^\.PHONY: (.*)$", MAKEFILE, re.MULTILINE)[1].split())
    assert phony == set(re.findall(r"^([a-z-]+):", MAKEFILE, re.MULTILINE))


def test_plain_make_shows_the_help():
    plain, help_target = (
        subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout
        for command in (["make"], ["make", "help"])
    )
    assert plain == help_target
