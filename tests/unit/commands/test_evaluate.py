"""`zerotrain evaluate`, its one rank in this process: what counts, and what is told."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.cases import EVALUATION, WRONG_RUN
from zerotrain.checkpoint.folder import remove_old
from zerotrain.commands import evaluate, generate
from zerotrain.commands.export import main as export
from zerotrain.config.schema import Config
from zerotrain.errors import ConfigError
from zerotrain.run import factory
from zerotrain.saved.saved import ABOUT
from zerotrain.training import Metric

pytestmark = pytest.mark.usefixtures("evaluates_here")

ADAMW = {"_target_": "torch.optim.AdamW", "_partial_": True, "lr": 1e-3}
COSINE = {"_target_": "zerotrain.training.warmup_cosine", "_partial_": True, "warmup_steps": 2, "final_fraction": 0.1}
SYNTHETIC = {"_target_": "zerotrain.data.SyntheticTokens", "seq_len": 8, "vocab_size": 16, "num_sequences": 64}


class Drawn(nn.Module):
    """Looks through features that are drawn when it is built, and saved nowhere."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("features", torch.randn(16, 8), persistent=False)
        self.output = nn.Linear(8, 16)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        logits = self.output(self.features[ids])
        return logits if labels is None else nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


class Wider(Drawn):
    def __init__(self) -> None:
        super().__init__()
        self.output = nn.Linear(8, 32)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, float]:
    """A run, and its last validation loss."""
    folder = tmp_path_factory.mktemp("run")
    config = Config(model={"_target_": f"{__name__}.Drawn"}, data=SYNTHETIC, optimizer=ADAMW, scheduler=COSINE)
    config.train.max_steps, config.train.eval_batches, config.seed = 2, 1, 5
    result = factory.run(factory.RunSpec(config, folder, []))
    return folder, result["final_val_loss"]


class Bytes(Drawn):
    def __init__(self) -> None:
        super().__init__()
        self.features, self.output = torch.randn(256, 8), nn.Linear(8, 256)


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> list[str]:
    assert evaluate.main([*map(str, arguments), "--trust-code"]) == 2
    return capsys.readouterr().err.splitlines()


@pytest.mark.case(
    "checkpoints", "of a model that draws buffers which are not saved", "those of the run", under=EVALUATION
)
def test_what_the_model_draws_when_it_is_built_is_what_the_run_drew(run: tuple[Path, float]) -> None:
    """Buffers that are not saved were others, and so was the loss (2026-11-22)."""
    torch.manual_seed(99)
    assert evaluate.evaluate(run[0], trust_code=True) == (2, {"val_loss": run[1]})


class Steps(Metric):
    def value(self, loss: float, kept: Any) -> float:
        return 1.0


MIXED = Config(
    callbacks={
        "accuracy": {"_target_": "zerotrain.training.metrics.Accuracy"},
        "own": {"_target_": f"{__name__}.Steps"},
        "other": {"_target_": f"{__name__}.Drawn"},
        "early": {"_target_": "zerotrain.training.callbacks.early_stopping.EarlyStopping"},
        "curves": {"_target_": "zerotrain.training.callbacks.loggers.TensorBoard"},
        "none": None,
        "f1": {"_target_": "zerotrain.training.TorchMetric", "metric": {"_target_": "a.B"}},
    }
)


def test_the_metrics_of_a_run_are_computed_and_no_class_of_others_is_looked_at_without_trust() -> None:
    found, left_out = evaluate._metrics_of(MIXED, None, False)
    assert (list(found), left_out) == (["accuracy"], ["own", "other", "f1"])
    assert list(evaluate._metrics_of(MIXED, None, True)[0]) == ["accuracy", "own", "f1"]
    assert list(evaluate._metrics_of(MIXED, ["perplexity"], False)[0]) == ["perplexity"]
    assert list(evaluate._metrics_of(MIXED, ["own", "accuracy"], True)[0]) == ["own", "accuracy"]
    assert evaluate._metrics_of(MIXED, [], False) == ({}, [])
    with pytest.raises(ConfigError) as refused:
        evaluate._metrics_of(MIXED, ["own", "acuracy"], False)
    assert refused.value.problems == (
        "--metrics: own is of a class that is not known; give --trust-code to run its code",
        "--metrics: there is no acuracy; there are accuracy, perplexity",
    )
    of_training = {"accuracy": MIXED.callbacks["accuracy"] | {"of": ["training"]}}
    assert evaluate._metrics_of(Config(callbacks=of_training), None, False)[0] == of_training
    assert evaluate._metrics_of(Config(callbacks=of_training), ["accuracy"], False)[0] == {
        "accuracy": evaluate.METRICS["accuracy"]
    }


def test_sets_and_metrics_that_are_given_are_evaluated(run: tuple[Path, float], capsys) -> None:
    """A run without any, and in one line each what cannot be."""
    sets = "data.validation_sets={more: {num_sequences: 32}}"
    step, found = evaluate.evaluate(run[0], [sets], metrics=["perplexity", "accuracy"], trust_code=True)
    names = ["val_loss", "val_perplexity", "val_accuracy"]
    assert (step, list(found), found["val_loss"]) == (2, [*names, *(f"{name}/more" for name in names)], run[1])
    assert found["val_perplexity/more"] == math.exp(found["val_loss/more"])
    wrong = ["data.validation_sets={'a/b': {}}", "--metrics", "accuracy"]
    assert refused(capsys, run[0], *wrong)[0].startswith("data.validation_sets: got {'a/b': {}}; it must be null, or")
    assert refused(capsys, run[0], "data.validation_sets={a: {rows: 3}}")[0].startswith("data.validation_sets.a.rows: ")


@pytest.mark.case("checkpoints", WRONG_RUN, under=EVALUATION)
def test_a_setting_without_an_effect_is_told_and_so_are_groups(run: tuple[Path, float], capsys) -> None:
    for setting in ("train.max_steps=3", "zero.schedule={0: 1}", "optimizer.lr=1", "checkpoint.init_from=x"):
        assert refused(capsys, run[0], setting) == [f"{setting}: has no effect on an evaluation; leave it out"]
    [line] = refused(capsys, run[0], "precision=bf16")
    assert line.startswith("precision=bf16: precision is a group; give one of its settings: precision.")
    assert refused(capsys, run[0], "zero.stage=7") == [
        "zero.stage: got 7; it must be 0, 1, 2 or 3, or auto; the default is 2"
    ]


def test_text_is_prepared_where_the_user_says_and_never_where_a_file_does(tmp_path: Path, monkeypatch) -> None:
    """A checkpoint of somebody else had a folder of its choice made, and files in it."""
    texts, of_file, mine, given = (tmp_path / name for name in ("texts", "of_file", "mine", "given"))
    texts.mkdir()
    for name in ("a", "b"):
        (texts / name).write_text("some words " * 50)
    text = {"_target_": "zerotrain.data.TextDataset", "path": str(texts), "seq_len": 8, "cache_dir": str(of_file)}
    mix = {"_target_": "zerotrain.data.Mix", "seq_len": 8, "sources": {"one": {"weight": 1, "data": text}}}
    for data, own in ((text, ["data.cache_dir=given"]), (mix, ["data.sources.one.data.cache_dir=given"])):
        config = Config(model={"_target_": f"{__name__}.Bytes"}, data=data, optimizer=ADAMW, scheduler=COSINE)
        config.train.max_steps, config.train.eval_batches = 1, 1
        folder = tmp_path / str(len(own[0]))
        folder.mkdir()
        loss = factory.run(factory.RunSpec(config, folder, []))["final_val_loss"]
        shutil.rmtree(of_file)
        monkeypatch.setenv("XDG_CACHE_HOME", str(mine))
        monkeypatch.chdir(tmp_path)
        for settings, used in (([], mine / "zerotrain"), (own, given)):
            assert evaluate.evaluate(folder, settings, trust_code=True)[1]["val_loss"] == loss
            assert not of_file.exists()
            assert any(used.iterdir())
            shutil.rmtree(used)


def test_what_a_file_says_is_never_resolved_and_what_the_user_says_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINE", "of the environment")
    data = {"_target_": "zerotrain.data.TextDataset", "path": "${oc.env:MINE}", "seq_len": 8, "cache_dir": None}
    config = Config(model={"_target_": f"{__name__}.Drawn"}, data=data, optimizer=ADAMW, scheduler=COSINE)
    settings = ["data.tokenizer=${data.path}", "data.cache_dir=${oc.env:MINE}"]
    changed = evaluate.with_settings(config, settings, Path("run"), evaluate.EVALUATION, trust_code=True)
    assert changed.data["path"] == changed.data["tokenizer"] == "${oc.env:MINE}"
    assert changed.data["cache_dir"] == "of the environment"


def test_a_class_of_the_user_is_built_where_he_trusts_it_or_names_it(run: tuple[Path, float], capsys) -> None:
    assert evaluate.main([str(run[0])]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert f"names model._target_={__name__}.Drawn; a file may only name " in line
    assert evaluate.evaluate(run[0], [f"model._target_={__name__}.Drawn"]) == (2, {"val_loss": run[1]})
    assert evaluate.evaluate(run[0], trust_code=True) == (2, {"val_loss": run[1]})


@pytest.mark.case(
    "checkpoints", "data that has changed since", "a warning, unless other data was asked for", under=EVALUATION
)
def test_other_data_than_the_runs_is_told_unless_it_was_asked_for(run, tmp_path, capsys) -> None:
    path = tmp_path / "exported"
    assert export([str(run[0]), "--out", str(path)]) == 0
    said = json.loads((path / ABOUT).read_text())
    said["data_fingerprint"]["rows"] += 1
    (path / ABOUT).write_text(json.dumps(said))
    for settings, is_told in (((), True), (("data.num_sequences=48",), False)):
        assert evaluate.main([str(path), "--trust-code", *settings]) == 0
        assert ("warning: the data differs from that of the run" in capsys.readouterr().err) == is_told


@pytest.mark.case("checkpoints", WRONG_RUN, under=EVALUATION)
def test_an_exported_folder_that_does_not_say_what_it_is_of_is_told(run: tuple[Path, float], tmp_path, capsys) -> None:
    path = tmp_path / "exported"
    assert export([str(run[0]), "--out", str(path)]) == 0
    whole = (path / ABOUT).read_text()
    (path / ABOUT).write_text(whole[:-9])
    [line] = refused(capsys, path)
    assert line == f"{path}/{ABOUT} does not name the run that was exported; export it again"
    (path / ABOUT).write_text(json.dumps(json.loads(whole) | {"config": None}))
    assert "was not saved by a run of launch.py" in refused(capsys, path)[0]
    assert generate.main([str(path), "--prompt", "a"]) == 2
    assert "was not saved by a run of launch.py" in capsys.readouterr().err
    (path / ABOUT).unlink()  # an export that was cut off: it is written last
    assert "has no checkpoint in it" in refused(capsys, path)[0]


@pytest.mark.case("checkpoints", WRONG_RUN, under=EVALUATION)
def test_weights_of_another_model_are_told_before_any_rank_starts(run: tuple[Path, float], tmp_path, capsys) -> None:
    for line in refused(capsys, run[0], f"model._target_={__name__}.Wider", "launch.nproc_per_node=2"):
        assert "does not fit the engine: output." in line


def test_a_run_that_goes_on_does_not_remove_what_is_evaluated(run: tuple[Path, float], tmp_path, monkeypatch) -> None:
    folder = Path(shutil.copytree(run[0], tmp_path / "run")) / "checkpoints"
    check = evaluate._checked

    def beside_saves(*given: Any) -> Any:
        for step in range(5, 50, 5):
            shutil.copytree(folder / "step-00000002", folder / f"step-{step:08d}")
            remove_old(folder, keep=1, keep_every=None)
        return check(*given)

    monkeypatch.setattr(evaluate, "_checked", beside_saves)
    assert evaluate.evaluate(tmp_path / "run", trust_code=True) == (2, {"val_loss": run[1]})
    assert sorted(each.name for each in folder.iterdir()) == ["step-00000002", "step-00000045"]


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("seed=[a", "seed=[a: cannot be read as a value; close its quotes and brackets, or quote it as a text"),
        ("seed=!!python/name:os.system x", "seed=!!python/name:os.system x: cannot be read as a value"),
        (f"zero.units={'[' * 3000}", "zero.units=[[["),
        ("model.hidden.deep.er=1", "model.hidden: tests.unit.commands.test_evaluate.Drawn takes no such argument"),
        ("data.seq_len.x=1", "data.seq_len: got {'x': 1}; zerotrain.data.SyntheticTokens takes a whole number"),
        ("data[=1", "data[=1: is no setting"),
        ("=1", "=1: is no setting with a value of this run"),
        ("~data.a", "~data.a: an evaluation can only change settings; give data.a=VALUE, such as data.a=null"),
        ("data.sql_len", "data.sql_len: is no setting with a value of this run; did you mean data.seq_len?"),
    ],
)
def test_a_setting_that_cannot_be_read_is_one_line(run: tuple[Path, float], setting: str, said: str, capsys) -> None:
    [line] = refused(capsys, run[0], setting)
    assert line.startswith(said)
    assert "offload" not in line
    assert len(line) < 2100


@pytest.mark.case("checkpoints", WRONG_RUN, under=EVALUATION)
def test_a_checkpoint_that_its_run_removes_meanwhile_is_told(run: tuple[Path, float], tmp_path, capsys, monkeypatch):
    [checkpoint] = (run[0] / "checkpoints").iterdir()

    def removed(config: Any, weights: str, *num_ranks: int) -> Any:
        checkpoint.rename(tmp_path / "gone")
        return {}

    monkeypatch.setattr(evaluate, "_checked", removed)
    [*_, line] = refused(capsys, run[0])
    (tmp_path / "gone").rename(checkpoint)
    assert line == f"{checkpoint} was removed by its run while it was read; try again with a newer one"


def test_a_rank_of_torchrun_that_was_started_among_others_than_asked_for_is_told(run, monkeypatch) -> None:
    for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "2"), ("LOCAL_WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "29500")
    with pytest.raises(ConfigError, match=r"^launch\.nproc_per_node: got 3; torchrun has started 2; leave it out$"):
        evaluate.evaluate(run[0], ["launch.nproc_per_node=3"], trust_code=True)
