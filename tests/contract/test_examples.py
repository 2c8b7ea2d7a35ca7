"""examples/: each file is what its system takes, with no key that it does not know, and its settings are settings."""

import copy
import re
import shlex
import subprocess
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pydantic
import pytest
import yaml

from zerotrain.commands.slurm import batch_file
from zerotrain.config.compose import register_schema
from zerotrain.config.explain import composition_problems
from zerotrain.launching.command import composing

REPOSITORY = Path(__file__).resolve().parents[2]
EXAMPLES = REPOSITORY / "examples"
KUBERNETES = "1.34"
SETTING = re.compile(r"(?<![\w.$-])[a-z_]+(?:\.[a-z_]+)+=[^\s\\]+")
OF_SKYPILOT = {
    "name": None, "num_nodes": None, "workdir": None, "setup": None, "run": None, "envs": None,
    "resources": {
        "accelerators": None, "use_spot": None, "infra": None, "disk_size": None,
        "job_recovery": {"strategy": None, "max_restarts_on_errors": None},
    },
    "file_mounts": {"/runs": {"name": None, "source": None, "store": None, "mode": None}},
}  # fmt: skip
"""The keys of a task of SkyPilot that are used, of https://docs.skypilot.co/en/stable/reference/yaml-spec.html."""


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((EXAMPLES / name).read_text()))


def check_kubernetes(document: Any) -> None:
    try:
        kubernetes_validate.validate(document, KUBERNETES, strict=True)
    except kubernetes_validate.ValidationError as error:
        raise ValueError(error.message) from error


def check_trainjob(document: Any) -> None:
    from kubeflow_trainer_api.models import TrainerV1alpha1TrainJob  # takes a second, which each worker would pay

    TrainerV1alpha1TrainJob.from_dict(document)
    if unknown := list(keys_unknown_to(TrainerV1alpha1TrainJob, document)):
        raise ValueError(str(unknown))


def keys_unknown_to(kind: Any, value: Any) -> Iterator[str]:
    """The keys that a model of pydantic does not have, which it takes without a word."""
    if isinstance(value, list):
        for each in value:
            yield from keys_unknown_to((typing.get_args(kind) or (Any,))[0], each)
    kinds = [each for each in (kind, *typing.get_args(kind)) if isinstance(each, type)]
    model = next((each for each in kinds if issubclass(each, pydantic.BaseModel)), None)
    if model is None:
        lists = [each for each in typing.get_args(kind) if typing.get_origin(each) is list]
        if isinstance(value, list) and lists:
            yield from keys_unknown_to(lists[0], value)
        return
    if isinstance(value, dict):
        fields = {each.alias or name: each.annotation for name, each in model.model_fields.items()}
        for key, inner in value.items():
            if key not in fields:
                yield f"{model.__name__}: {key}"
            else:
                yield from keys_unknown_to(fields[key], inner)


def check_skypilot(document: Any, known: Any = OF_SKYPILOT) -> None:
    for key, value in document.items():
        if key not in known:
            raise ValueError(key)
        if isinstance(known[key], dict):
            check_skypilot(value, known[key])


CHECKS: dict[tuple[str, int], Callable[[Any], None]] = {
    ("indexed-job.yaml", 0): check_kubernetes,
    ("indexed-job.yaml", 1): check_kubernetes,
    ("trainjob.yaml", 0): check_trainjob,
    ("skypilot.yaml", 0): check_skypilot,
}


def mappings(value: Any) -> Iterator[dict[str, Any]]:
    """Each mapping with keys of the system's own: those of limits, labels and selectors are the user's."""
    if isinstance(value, dict):
        yield value
        for key, inner in value.items():
            if key not in ("limits", "selector", "labels", "file_mounts"):
                yield from mappings(inner)
    if isinstance(value, list):
        for each in value:
            yield from mappings(each)


@pytest.mark.parametrize(("name", "number"), CHECKS)
def test_a_yaml_is_taken_and_an_unknown_key_anywhere_in_it_is_refused(name: str, number: int):
    document, check = documents(name)[number], CHECKS[name, number]
    assert len(documents(name)) == sum(each == name for each, _ in CHECKS)
    check(document)
    places = len(list(mappings(document)))
    assert places > 1
    for place in range(places):
        changed = copy.deepcopy(document)
        list(mappings(changed))[place]["notAKey"] = "x"
        with pytest.raises(ValueError, match=r"notAKey"):
            check(changed)


@pytest.mark.parametrize("name", sorted(path.name for path in EXAMPLES.glob("*.[ys]*")))
def test_the_settings_of_an_example_are_settings_and_its_shell_can_be_read(name: str):
    text = (EXAMPLES / name).read_text()
    settings = SETTING.findall(text)
    assert settings
    register_schema()
    with composing([REPOSITORY / "conf"]) as compose:
        assert composition_problems(settings, compose, is_sweep=False) == []
    scripts = [text] if name.endswith(".sbatch") else scripts_in(documents(name))
    assert scripts
    for script in scripts:
        subprocess.run(["sh", "-n"], input=script, text=True, check=True)
        assert ("zerotrain ended" in script) == ("torchrun" in script)


def scripts_in(value: Any) -> list[str]:
    if isinstance(value, dict | list):
        return [each for inner in (value.values() if isinstance(value, dict) else value) for each in scripts_in(inner)]
    return [value] if isinstance(value, str) and "zerotrain" in value and "\n" in value else []


def test_the_file_for_sbatch_is_that_of_the_command_but_for_its_python():
    lines = (EXAMPLES / "slurm.sbatch").read_text().splitlines()
    options = [line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH")]
    *_, command = shlex.split(lines[-1], comments=True)
    made = batch_file([each for each in options if "=" in each and not each.startswith("--open")], [command])
    assert sorted(options) == sorted(
        line.removeprefix("#SBATCH ") for line in made.splitlines() if line.startswith("#SBATCH")
    )
    assert made.splitlines()[-1].split(" -m ")[1] == lines[-1].split(" -m ")[1]
