"""The Makefile: what can be typed is listed, with a line that says what it does."""

import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
MAKEFILE = (REPOSITORY / "Makefile").read_text()


OF_MAKE = ("MAKEFLAGS", "MAKEOVERRIDES", "MAKELEVEL", "TORCH", "PYTHON", "VENV")
"""Variables of a `make test` around this test, which a make inside would take over."""


def said_by(*command: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name not in OF_MAKE}
    return subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=True).stdout


def test_make_alone_lists_every_target_and_no_file_can_hide_one():
    listed = dict(re.findall(r"^  make ([a-z0-9-]+) +(.+)$", said_by("make", "help"), re.MULTILINE))
    targets = set(re.findall(r"^([a-z0-9-]+):", MAKEFILE, re.MULTILINE))
    phony = set(re.search(r"^\.PHONY: (.*)$", MAKEFILE, re.MULTILINE)[1].split())
    assert listed.keys() == phony == targets
    assert {"train", "test", "check", "format", "sweep", "clean", "help"} <= targets
    assert said_by("make") == said_by("make", "help")


def test_another_torch_has_an_environment_and_a_pin_of_its_own(tmp_path: Path) -> None:
    usual = said_by("make", "-n", "test", f"VENV={tmp_path}")
    assert "-c constraints.txt " in usual
    assert "sed" not in usual
    other = said_by("make", "-n", "test", f"VENV={tmp_path}", "TORCH=2.99.0", f"PYTHON={sys.executable}")
    folder = tmp_path / f"torch-2.99.0-python{platform.python_version()}"
    programs = set(re.findall(rf"{tmp_path}\S*/bin/python", other))
    assert programs == {str(folder / "bin/python")}  # which installs and runs the tests
    assert f"-c {folder}/constraints.txt " in other
    [command] = re.findall(r"^sed .* > .*$", other, re.MULTILINE)
    folder.mkdir()
    subprocess.run(command, shell=True, cwd=REPOSITORY, check=True)
    lines = (REPOSITORY / "constraints.txt").read_text().splitlines()
    pinned = (folder / "constraints.txt").read_text().splitlines()
    changed = [(ours, other) for ours, other in zip(lines, pinned, strict=True) if ours != other]
    assert [(ours[:7], other) for ours, other in changed] == [("torch==", "torch==2.99.0")]


def test_a_script_beside_a_clone_called_zerotrain_imports_the_package(tmp_path: Path) -> None:
    """Built as `make install` does it: Python also finds the folder of the clone, since a script's own folder comes
    first."""
    clone, site = tmp_path / "zerotrain", tmp_path / "site"
    ignored = shutil.ignore_patterns("__pycache__")
    for name in ("zerotrain", "conf"):
        shutil.copytree(REPOSITORY / name, clone / name, ignore=ignored)
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, clone)
    [mode] = re.findall(r"editable_mode=(\w+)", MAKEFILE)
    build = "import sys; from setuptools.build_meta import build_editable as build; build(sys.argv[1], "
    build += f"{{'editable_mode': {mode!r}}})"
    site.mkdir()
    subprocess.run([sys.executable, "-c", build, site], cwd=clone, check=True, capture_output=True)
    [wheel] = site.glob("*.whl")
    shutil.unpack_archive(wheel, site, "zip")
    script = tmp_path / "script.py"
    script.write_text(
        "import importlib.util, site, sys; site.addsitedir(sys.argv[1]); "
        "print(importlib.util.find_spec('zerotrain').origin)"
    )
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-S", script, site]  # -S: the environment of the tests has a zerotrain of its own
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == str(clone / "zerotrain/__init__.py")
