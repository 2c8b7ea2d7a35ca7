"""Promises about conf/: every yaml composes, every setting is documented. The names that others rely on: public.txt."""

import ast
import functools
import inspect
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import hydra
import pytest
from omegaconf import DictConfig, OmegaConf

from zerotrain import settings
from zerotrain.config import schema
from zerotrain.config.checks import checked_config
from zerotrain.config.compose import known_keys, register_schema
from zerotrain.config.words import OURS

REPOSITORY = Path(__file__).resolve().parents[2]
CONF = REPOSITORY / "conf"
GROUP_FILES = sorted(path.relative_to(CONF) for path in CONF.glob("*/*.yaml"))
NEEDED = {
    "data/huggingface": ["data.path=x", "data.vocab_size=256"],
    "data/mix": [
        "data.sources={a: {weight: 1, data: {_target_: zerotrain.data.SyntheticTokens, seq_len: 128, vocab_size: 256}}}"
    ],
    "data/own": ["data._target_=zerotrain.data.SyntheticTokens", "+data.seq_len=16", "+data.vocab_size=13"],
    "data/tokens": ["data.path=x"],
    "loss/own": ["loss._target_=torch.nn.functional.mse_loss"],
    "model/own": ["model._target_=torch.nn.Identity"],
    "data/tokenized": ["model=huggingface"],
    "data/chat": ["model=huggingface", "data.path=x"],
    "experiment/chat_lora": ["data.path=x", "model.name_or_path=x"],
    "experiment/gpt2_bf16": ["data.path=x"],
    "experiment/llama_1b_bf16": ["data.path=x"],
}
"""What a choice leaves to the user."""


@pytest.fixture(autouse=True)
def composing() -> Iterator[None]:
    register_schema()
    with hydra.initialize_config_dir(config_dir=str(CONF), version_base="1.3"):
        yield


@pytest.mark.parametrize("path", GROUP_FILES, ids=str)
def test_every_yaml_composes_without_problems(path: Path):
    choice = f"{path.parent}={path.stem}"
    composed = hydra.compose("train", [choice, *NEEDED.get(str(path.with_suffix("")), [])])
    assert checked_config(composed)[1] == []


@pytest.mark.parametrize("ours", sorted(set(OURS.values())))
def test_what_a_word_of_others_is_answered_with_is_there(ours: str):
    *choices, last = ours.split()
    choices += [last] if "=" in last else []
    composed, keys, problems = composed_with(*choices)
    assert "=" in last or last in keys or OmegaConf.select(composed, last) is not None or (CONF / last).is_dir()
    assert problems == []


@functools.cache
def composed_with(*choices: str) -> tuple[DictConfig, list[str], list[str]]:
    """What Hydra composes, its own settings too, with the names of ours and their problems."""
    composed = hydra.compose("train", list(choices))
    everything = hydra.compose("train", list(choices), return_hydra_config=True)
    return everything, known_keys(composed), checked_config(composed)[1]


@pytest.mark.parametrize("path", [path for path in GROUP_FILES if str(path.parent) in ("experiment", "debug")], ids=str)
def test_an_experiment_says_the_command_that_runs_it(path: Path):
    directive, command = (CONF / path).read_text().splitlines()[:2]
    assert directive == "# @package _global_"
    assert "launch.py" in command
    assert f"{path.parent}={path.stem}" in command
    settings = [word for word in shlex.split(command) if "=" in word]
    composed = hydra.compose("train", settings, return_hydra_config=True)
    sweep = [f"{name}={values.split(',')[-1]}" for name, values in (composed.hydra.sweeper.params or {}).items()]
    assert ("-m" in command.split()) == bool(sweep)
    assert checked_config(hydra.compose("train", settings + sweep))[1] == []


def test_every_setting_of_the_schema_is_documented():
    plain_sections = {"zero", "precision", "offload", "train", "checkpoint", "launch", "plan", "sweep"}
    bodies = [ast.parse(Path(inspect.getfile(module)).read_text()).body for module in (schema, settings)]
    undocumented = []
    for section in (node for body in bodies for node in body if isinstance(node, ast.ClassDef)):
        if "Config" not in section.name and not section.name.endswith("Switches"):
            continue
        for field, after in zip(section.body, [*section.body[1:], None], strict=True):
            is_documented = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and not is_documented:
                undocumented.append(field.target.id)
    assert set(undocumented) <= plain_sections


def run_python(*arguments: str, **environment: str) -> str:
    process = subprocess.run(
        [sys.executable, *arguments], cwd=REPOSITORY, env={"PATH": "", **environment}, capture_output=True, text=True
    )
    assert process.returncode == 0, process.stderr
    return process.stdout


@pytest.mark.parametrize(
    ("typed", "offered"), [("zero.st", "zero.stage="), ("model=gpt2_", "model=gpt2_large"), ("prec", "precision=")]
)
def test_tab_completes_settings_and_choices(typed: str, offered: str):
    line = f"python launch.py {typed}"
    offers = run_python("launch.py", "-sc", "query=bash", COMP_LINE=line, COMP_POINT=str(len(line)), _="launch.py")
    assert offered in offers.split()
