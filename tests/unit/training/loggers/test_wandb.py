"""A run at Weights & Biases without a network, as wandb's own reader has the files."""

import json
import subprocess
import sys

import pytest

from zerotrain.checkpoint import checkpoints_in
from zerotrain.training.callbacks.checkpoints import CheckpointPolicy
from zerotrain.training.callbacks.loggers import SWEEP_VARIABLE, WandB, ids_in

EVERY_2 = CheckpointPolicy(every_steps=2, asynchronous=False, at_end=False)


@pytest.fixture(autouse=True, scope="module")
def without_service():
    """No test after these has threads of wandb, and none before them its imports."""
    wandb = pytest.importorskip("wandb")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_ERROR_REPORTING", "false")
        yield
        wandb.teardown()


def file_of(folder):
    [file] = folder.glob("wandb/offline-run-*/*.wandb")
    return file


def inspected(file, *options):
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", *options, str(file)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def curves_at(file):
    found = {}
    for record in map(json.loads, inspected(file).splitlines()):
        if record["type"] == "history":
            item = record["history"]["item"]
            for name, value in item.items():
                if not name.startswith("_"):
                    found.setdefault(name, []).append((item["_step"], value))
    return found


def test_each_number_the_settings_and_the_end_are_there(make_trainer, tmp_path, curves_of, monkeypatch):
    monkeypatch.setenv(SWEEP_VARIABLE, json.dumps({"group": "day/time", "name": "seed=3"}))
    logger = WandB(mode="offline", project="mine", name="first", tags=["a", "b"])
    settings = {"zero": {"stage": 2, "schedule": None}, "seed": 3}
    make_trainer(max_steps=3, eval_every=2, callbacks={"wandb": logger}, settings=settings).run()
    assert curves_at(file_of(tmp_path)) == curves_of(tmp_path)
    said = json.loads(inspected(file_of(tmp_path), "--summary"))
    assert (said["project"], said["name"], said["tags"], said["exit_code"]) == ("mine", "first", ["a", "b"], 0)
    assert b"day/time" in file_of(tmp_path).read_bytes()
    assert WandB(mode="offline", group="own")._given | {"project": None} == {
        **dict.fromkeys(("project", "entity", "tags")), "name": "seed=3", "group": "own",
    }  # fmt: skip
    assert ids_in(tmp_path) == {"wandb": said["run_id"]}
    assert (said["config"]["zero"]["stage"], said["config"]["seed"]) == (2, 3)
    assert {"torch", "command", "host"} <= set(said["config"]["environment"])
    assert (said["summary"]["status"], said["summary"]["result/steps"]) == ("completed", 3)
    assert json.loads((tmp_path / "wandb.json").read_text())["id"] == said["run_id"]


def test_changes_that_no_commit_has_are_kept_there(make_trainer, changed_code, tmp_path):
    make_trainer(max_steps=1, callbacks={"wandb": WandB(mode="offline")}).run()
    [kept] = tmp_path.glob("wandb/offline-run-*/files/git.diff")
    assert "-old = 1" in kept.read_text()


@pytest.mark.slow
def test_a_run_that_is_killed_twice_is_one_curve(killed_twice, require_one_curve):
    folder = killed_twice("logger=wandb", "callbacks.wandb.mode=offline", WANDB_ERROR_REPORTING="false")
    require_one_curve(folder, curves_at(file_of(folder)))
    earlier = sorted(folder.glob("wandb/earlier/*/*.wandb"))
    assert {path.name for path in earlier} == {file_of(folder).name}
    assert len(earlier) == 2


def test_a_run_that_goes_on_in_another_folder_is_the_same_run(make_trainer, tmp_path, curves_of):
    first = make_trainer(max_steps=3, callbacks={"wandb": WandB(mode="offline")}, checkpoint=EVERY_2)
    first.run()
    policy = CheckpointPolicy(resume=checkpoints_in(tmp_path / "checkpoints"), at_end=False)
    second = tmp_path / "second"
    second.mkdir()
    callbacks = {"wandb": WandB(mode="offline")}
    make_trainer(engine=first.engine, max_steps=5, callbacks=callbacks, checkpoint=policy, run_dir=second).run()
    assert file_of(second).name == file_of(tmp_path).name
    assert curves_at(file_of(second)) == curves_of(second)
    assert [step for step, _ in curves_of(second)["train_loss"]] == [1, 2, 3, 4, 5]


def test_a_run_that_fails_is_told_so(make_trainer, tmp_path):
    from zerotrain.training import Callback

    class Raising(Callback):
        def after_step(self, run, outcome):
            raise RuntimeError("enough")

    callbacks = {"wandb": WandB(mode="offline"), "raising": Raising()}
    with pytest.raises(Exception, match="enough"):
        make_trainer(max_steps=3, callbacks=callbacks).run()
    said = json.loads(inspected(file_of(tmp_path), "--summary"))
    assert (said["exit_code"], said["summary"]["status"]) == (1, "failed")


def test_disabled_it_writes_no_curve(make_trainer, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "disabled")
    make_trainer(max_steps=1, callbacks={"wandb": WandB()}).run()
    assert not list(tmp_path.glob("**/*.wandb"))


def test_without_a_login_it_only_warns(make_trainer, screen, monkeypatch, tmp_path):
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    assert make_trainer(max_steps=1, callbacks={"wandb": WandB(mode="online")}).run()["status"] == "completed"
    assert "callbacks.wandb: start after step 0" in " ".join(screen.getvalue().split())


def test_a_mode_that_there_is_not_is_refused():
    with pytest.raises(ValueError, match=r"mode=on; it must be online, offline, disabled or null"):
        WandB(mode="on")
