"""Which names a file may have, and that nothing happens where they are looked up."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import zerotrain.data
import zerotrain.models
from zerotrain.config.compose import from_values
from zerotrain.config.schema import Config
from zerotrain.errors import ConfigError
from zerotrain.run.factory import build
from zerotrain.saved.saved import are_known, require_trusted

HERE = Path("/run")
CONF = Path(__file__).parents[3] / "conf"
KNOWN = [
    *(f"zerotrain.models.{name}" for name in zerotrain.models.__all__),
    *(f"zerotrain.data.{name}" for name in zerotrain.data.__all__),
    "zerotrain.models.gpt.GPT", "zerotrain.MuonWithAdamW", "zerotrain.training.warmup_cosine",
    "zerotrain.training.schedule.constant", "torch.nn.Linear", "torch.nn.modules.linear.Linear", "torch.optim.AdamW",
    "torch.optim.sgd.SGD",
]  # fmt: skip
FOREIGN = [
    "os.system", "builtins.open", "builtins.eval", "torch.load", "torch.hub.load", "torch.nn.modules.module.torch.load",
    "torch.nn.Module.load_state_dict", "torch.nn.modules", "torch.nn.init.normal_", "torch.nn.DataParallel",
    "torch.nn.utils.clip_grad_norm_", "zerotrain.inspect.os.system", "zerotrain.run.factory.build",
    "zerotrain.models.gpt.torch.load", "zerotrain.models.huggingface.HuggingFaceModel.__init__",
    "zerotrain.checkpoint.others.safetensors_and_torch.write_text", "zerotrain.models.GPT.forward.__globals__",
    "zerotrain", "", ".", None, 7, ["torch.nn.Linear"], {"a": "torch.nn.Linear"},
]  # fmt: skip


def config(**groups: Any) -> Config:
    return from_values({name: {"_target_": "torch.nn.Linear", **values} for name, values in groups.items()})


def refusal(given: Config, groups: tuple[str, ...] = ("model",), **named: Any) -> str | None:
    try:
        require_trusted(given, groups, HERE, overrides=named)
    except ConfigError as error:
        return str(error)
    return None


@pytest.mark.parametrize("name", KNOWN)
def test_models_data_layers_and_optimizers_are_known(name: str) -> None:
    assert refusal(config(model={"_target_": name})) is None


@pytest.mark.parametrize("group", ["model", "data", "optimizer", "scheduler"])
def test_whatever_a_file_of_conf_names_is_known(group: str) -> None:
    for path in sorted((CONF / group).glob("*.yaml")):
        values = yaml.safe_load(path.read_text())
        assert values.get("_target_") == "???" or are_known(values), path


@pytest.mark.parametrize("name", FOREIGN, ids=str)
@pytest.mark.parametrize("depth", range(3))
def test_others_are_refused_at_any_depth(name: Any, depth: int) -> None:
    target = {"_target_": name}
    values = (target, {"x": target}, {"x": [{"y": [[target]]}]})[depth]
    said = refusal(config(model=values))
    assert said is not None
    assert said.startswith(f"/run names model.{('', 'x.', 'x.0.y.0.0.')[depth]}_target_={name}; a file may only name ")
    assert "--trust-code" in said


def test_a_name_is_looked_up_without_an_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "imported.py").write_text("raise SystemExit('it ran')")
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)
    for name in ("imported.X", "zerotrain.imported.X", "antigravity.X", "torch.utils.tensorboard.X"):
        assert refusal(config(model={"_target_": name})) is not None
    assert set(sys.modules) == before


def test_a_name_leads_through_our_modules_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though what it leads to is known."""
    monkeypatch.setattr(torch.nn.modules.module, "elsewhere", sys, raising=False)
    monkeypatch.setattr(sys, "Linear", torch.nn.Linear, raising=False)
    assert refusal(config(model={"_target_": "torch.nn.modules.module.elsewhere.Linear"})) is not None


def test_what_the_user_names_is_trusted_where_he_names_it_and_nothing_else() -> None:
    given = config(model={"_target_": "mine.Model", "part": {"_target_": "mine.Part"}})
    assert "model.part._target_=mine.Part;" in (refusal(given, model={"_target_": "mine.Model"}) or "")
    assert "model._target_=mine.Model," in (refusal(given, model={"part": {"_target_": "mine.Model"}}) or "")
    assert "model._target_=mine.Model," in (refusal(given, model={"part": {"a": 1}}) or "")
    assert refusal(given, model={"_target_": "mine.Model", "part": {"_target_": "mine.Part"}}) is None


def test_only_groups_that_are_built_are_asked_about() -> None:
    given = config(model={}, optimizer={"_target_": "mine.Optimizer"})
    assert refusal(given) is None
    assert "optimizer._target_=mine.Optimizer;" in (refusal(given, ("model", "optimizer")) or "")


def test_a_variable_of_the_environment_stays_a_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "the users")
    text = r"a\\${oc.env:SECRET}\${x}\\"
    given = from_values({"model": {"_target_": "torch.nn.Linear", "x": [text]}, "checkpoint": {"resume": text}})
    assert given.model["x"] == [text]
    assert given.checkpoint.resume == text
    assert refusal(given) == f"/run: model.x.0 is {text}, and a reference in a file is never resolved"
    with pytest.raises(ConfigError, match=r"^model\.x\.0: got a.*oc\.env:SECRET.*must not contain \$\{"):
        build("model", given.model)
    assert isinstance(build("model", {"_target_": "torch.nn.Linear", "_args_": [2, 3]}), torch.nn.Linear)
