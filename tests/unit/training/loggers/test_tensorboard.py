"""Curves of a run, also of one that went on, are those of metrics.jsonl."""

import json
import math
import sys

import pytest

from zerotrain.checkpoint import checkpoints_in
from zerotrain.training import Callback
from zerotrain.training.callbacks.checkpoints import CheckpointPolicy
from zerotrain.training.callbacks.loggers import TensorBoard

EVERY_2 = CheckpointPolicy(every_steps=2, asynchronous=False, at_end=False)


def curves(run_dir):
    """{name: [(step, value)]} as TensorBoard shows them."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    shown = accumulator.EventAccumulator(str(run_dir / "tensorboard"))
    shown.Reload()
    names = [name for name in shown.Tags()["scalars"] if not name.startswith("result/")]
    return {name: [(each.step, each.value) for each in shown.Scalars(name)] for name in names}


def lines_of(run_dir):
    found = {}
    for line in map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines()):
        for name, value in line.items():
            if name != "step" and value is not None:
                found.setdefault(name, []).append((line["step"], pytest.approx(value, rel=1e-6)))
    return found


class Unknown(Callback):
    def after_step(self, run, outcome):
        run.log({"nothing": None, "nan": math.nan, "text": "x"})


def test_each_number_of_the_file_is_a_point(make_trainer, tmp_path):
    pytest.importorskip("tensorboard")
    make_trainer(max_steps=3, eval_every=2, callbacks={"tensorboard": TensorBoard()}).run()
    assert curves(tmp_path) == lines_of(tmp_path)
    assert {"train_loss", "val_loss"} <= set(curves(tmp_path))


def test_the_settings_the_versions_and_the_result_are_there(make_trainer, tmp_path, changed_code):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    settings = {"zero": {"stage": 2, "schedule": None}, "seed": 3}
    trainer = make_trainer(max_steps=3, eval_every=2, callbacks={"tensorboard": TensorBoard()}, settings=settings)
    body = trainer.run()
    shown = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    shown.Reload()
    texts = {name: shown.Tensors(name)[-1].tensor_proto.string_val[0].decode() for name in shown.Tags()["tensors"]}
    assert json.loads(texts["settings/text_summary"]) == settings
    assert {"torch", "python", "command", "host", "git_revision"} <= set(json.loads(texts["environment/text_summary"]))
    assert texts["status/text_summary"].strip() == "completed"
    results = {name: shown.Scalars(name)[-1] for name in shown.Tags()["scalars"] if name.startswith("result/")}
    assert (results["result/steps"].step, results["result/steps"].value) == (3, 3)
    assert results["result/final_val_loss"].value == pytest.approx(body["final_val_loss"], rel=1e-6)
    assert "result/memory_bytes.peak" in results
    assert "-old = 1" in (tmp_path / "git.diff").read_text()


def test_what_is_no_finite_number_is_left_out(make_trainer, tmp_path):
    pytest.importorskip("tensorboard")
    make_trainer(max_steps=1, callbacks={"tensorboard": TensorBoard(), "unknown": Unknown()}).run()
    assert not {"nothing", "nan", "text"} & set(curves(tmp_path))


@pytest.mark.parametrize("is_same_folder", [True, False], ids=["the same folder", "another folder"])
def test_a_run_that_went_on_is_one_curve(make_trainer, tmp_path, is_same_folder):
    pytest.importorskip("tensorboard")
    first = make_trainer(max_steps=3, callbacks={"tensorboard": TensorBoard()}, checkpoint=EVERY_2)
    first.run()
    [taken] = checkpoints_in(tmp_path / "checkpoints")
    folder = tmp_path if is_same_folder else tmp_path / "second"
    folder.mkdir(exist_ok=True)
    policy = CheckpointPolicy(resume=[taken], at_end=False)
    callbacks = {"tensorboard": TensorBoard()}
    make_trainer(engine=first.engine, max_steps=5, callbacks=callbacks, checkpoint=policy, run_dir=folder).run()
    assert [step for step, _ in curves(folder)["train_loss"]] == [1, 2, 3, 4, 5]
    assert curves(folder) == lines_of(folder)


def test_a_run_that_is_started_again_is_one_curve(make_trainer, tmp_path):
    pytest.importorskip("tensorboard")
    for max_steps in (3, 2):
        make_trainer(max_steps=max_steps, callbacks={"tensorboard": TensorBoard()}).run()
    assert curves(tmp_path) == lines_of(tmp_path)
    assert [step for step, _ in curves(tmp_path)["train_loss"]] == [1, 2]


def test_without_the_package_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr("zerotrain.training.callbacks.loggers.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"pip install 'zerotrain\[tensorboard\]' brings it"):
        TensorBoard()
    assert "zerotrain.training.callbacks.loggers" in sys.modules
