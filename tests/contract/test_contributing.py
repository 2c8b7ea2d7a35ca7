"""What a contributor, a workflow and an image are told to use is there."""

import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

REPOSITORY = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
MAKEFILE = (REPOSITORY / "Makefile").read_text()
WORKFLOW = yaml.safe_load((REPOSITORY / ".github/workflows/ci.yml").read_text())
DOCKERFILE = (REPOSITORY / "Dockerfile").read_text()
PROGRAMS = ".venv/bin/"
FOLDERS = ("benchmarks/", "conf/", "docs/", "examples/", "tests/", "zerotrain/", ".ci/", ".github/", PROGRAMS)
TO_BE_WRITTEN = "NAME"


def versions_of(requirement: str) -> str:
    """The oldest version that a dependency of the project may have."""
    [line] = [line for line in PROJECT["dependencies"] if line.startswith(requirement)]
    return line.removeprefix(requirement)


def steps_of(job: dict[str, Any]) -> list[str]:
    return [step["run"] for step in job["steps"] if "run" in step]


def test_every_file_and_target_that_contributing_names_is_there():
    text = (REPOSITORY / "CONTRIBUTING.md").read_text()
    paths = {each for each in re.findall(r"[\w./-]+", text) if each.startswith(FOLDERS) and TO_BE_WRITTEN not in each}
    assert len(paths) > 20
    places = {each: REPOSITORY / each.rstrip(".") for each in paths}
    for each in paths:
        if each.startswith(PROGRAMS):  # of this environment: that of another torch lies elsewhere
            places[each] = Path(sys.prefix, "bin", each.removeprefix(PROGRAMS))
    assert sorted(each for each, place in places.items() if not place.exists()) == []
    targets = set(re.findall(r"^make ([a-z-]+)|`make ([a-z-]+)", text, re.MULTILINE))
    assert [each for pair in targets for each in pair if each and f"\n{each}:" not in MAKEFILE] == []
    modules = re.findall(r"python -m (tests[\w.]+)", text)
    assert [each for each in modules if not (REPOSITORY / f"{each.replace('.', '/')}.py").is_file()] == []


def test_the_names_in_the_code_that_contributing_tells_to_change_are_there():
    text = (REPOSITORY / "CONTRIBUTING.md").read_text()
    named = re.findall(r"`(_?[A-Z]+)` in `(\S+\.py)`", text) + [
        (name, path) for path, name in re.findall(r"`(\S+\.py)`: one more row of `([A-Z]+)`", text)
    ]
    assert len(named) == 6
    for name, path in named:
        assert re.search(rf"^{name}\b", (REPOSITORY / path).read_text(), re.MULTILINE), (name, path)


def test_the_workflow_runs_the_pythons_and_the_oldest_torch_that_the_project_names():
    everything, torch = WORKFLOW["jobs"]["everything"], WORKFLOW["jobs"]["torch"]
    pythons = [each.rpartition(" ")[2] for each in PROJECT["classifiers"] if "Python :: 3." in each]
    assert everything["strategy"]["matrix"]["python"] == [pythons[0], pythons[-1]]
    assert PROJECT["requires-python"] == f">={pythons[0]}"
    [pinned] = re.findall(r"^torch==(.+)$", (REPOSITORY / "constraints.txt").read_text(), re.MULTILINE)
    releases = torch["strategy"]["matrix"]["torch"]
    assert releases[0].startswith(f"{versions_of('torch>=')}.")
    assert pinned not in releases
    assert steps_of(everything) == [".ci/run"]
    [command] = steps_of(torch)
    assert f"\n{command.split()[1]}:" in MAKEFILE
    for job in (everything, torch):
        [setup] = [step["with"] for step in job["steps"] if "python-version" in step.get("with", {})]
        assert setup["python-version"] in ("${{ matrix.python }}", *pythons)
        assert (REPOSITORY / setup["cache-dependency-path"]).is_file()


def test_the_image_is_built_of_files_that_are_there_and_not_ignored():
    rules = [line for line in (REPOSITORY / ".dockerignore").read_text().splitlines() if line and line[0] not in "#*"]
    kept = {rule.removeprefix("!") for rule in rules if rule.startswith("!")}
    copied = [word for line in re.findall(r"^COPY (?!--)(.+) \S+$", DOCKERFILE, re.MULTILINE) for word in line.split()]
    assert set(copied) == kept
    assert [name for name in copied if not (REPOSITORY / name).exists()] == []


def test_the_image_has_a_python_and_extras_of_the_project_and_no_address():
    arguments = dict(re.findall(r'^ARG (\w+)="?([^"\n]*)"?$', DOCKERFILE, re.MULTILINE))
    assert f"Programming Language :: Python :: {arguments['PYTHON']}" in PROJECT["classifiers"]
    assert set(arguments["EXTRAS"].split(",")) <= PROJECT["optional-dependencies"].keys()
    assert "://" not in DOCKERFILE
    table = (REPOSITORY / "docs/guides/container.md").read_text()
    for name, default in arguments.items():
        assert f"| `{name}` | {f'`{default}`' if default else 'empty'} |" in table


@pytest.mark.parametrize("name", ["bug", "feature"])
def test_an_issue_form_asks_for_each_thing_once_and_names_files_that_are_there(name: str):
    path = REPOSITORY / f".github/ISSUE_TEMPLATE/{name}.yml"
    form = yaml.safe_load(path.read_text())
    ids = [field["id"] for field in form["body"] if "id" in field]
    assert len(ids) == len(set(ids)) >= 3
    names = re.findall(r"[\w/]+\.md", path.read_text())
    assert [name for name in names if not (REPOSITORY / name).is_file()] == []


def test_a_commit_is_looked_at_by_the_ruff_of_make_install():
    [repository] = yaml.safe_load((REPOSITORY / ".pre-commit-config.yaml").read_text())["repos"]
    entries = [hook["entry"].split() for hook in repository["hooks"]]
    checks = re.findall(r"\$\(BIN\)/ruff (check|format)", MAKEFILE)
    assert {command[0] for command in entries} == {".venv/bin/ruff"}
    assert {command[1] for command in entries} == set(checks)
