"""A run is one at a tracker, whose id no file can forge, and which may break."""

import json
import math
import subprocess
import sys
from collections import defaultdict

import pytest

from zerotrain.checkpoint import checkpoints_in
from zerotrain.training import Callback, Request
from zerotrain.training.callbacks.checkpoints import CheckpointPolicy
from zerotrain.training.callbacks.loggers import (
    NO_POINTS,
    SWEEP_VARIABLE,
    TensorBoard,
    WandB,
    ids_in,
    tag_of,
)

# Curves of a run, also of one that went on, are those of metrics.jsonl.


EVERY_2 = CheckpointPolicy(every_steps=2, asynchronous=False, at_end=False)


def shown_in(run_dir):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    return accumulator.EventAccumulator(str(run_dir / "tensorboard")).Reload()


NAMES = {
    "train_loss": "train/loss", "val_loss": "val/loss", "val_loss/docs": "val/loss/docs", "val_score": "val/score",
    "lr": "train/lr", "lr/head": "train/lr/head", "grad_norm": "train/grad_norm", "tokens": "train/tokens",
    "tokens_per_s": "perf/tokens_per_s", "train_s": "perf/train_s", "peak_nbytes": "perf/peak_nbytes", "mine": "mine",
    "train": "train", "value": "value", "": "",
}  # fmt: skip


def test_a_metric_has_its_group():
    assert {name: tag_of(name) for name in NAMES} == NAMES


def curves(run_dir):
    """{name: [(step, value)]} as TensorBoard shows them."""
    shown = shown_in(run_dir)
    names = [name for name in shown.Tags()["scalars"] if not name.startswith("result/")]
    return {name: [(each.step, each.value) for each in shown.Scalars(name)] for name in names}


@pytest.fixture
def lines_of(curves_of):
    def read(run_dir):
        return {
            tag_of(name): [(step, pytest.approx(value, rel=1e-6)) for step, value in points]
            for name, points in curves_of(run_dir).items()
        }

    return read


def test_the_settings_the_versions_and_the_result_are_there(make_trainer, tmp_path, changed_code):
    pytest.importorskip("tensorboard")
    settings = {"zero": {"stage": 2, "schedule": None}, "seed": 3, "train": {"max_steps": 4}}
    trainer = make_trainer(max_steps=3, eval_every=2, callbacks={"tensorboard": TensorBoard()}, settings=settings)
    body, shown = trainer.run(), shown_in(tmp_path)
    texts = {name: shown.Tensors(name)[-1].tensor_proto.string_val[0].decode() for name in shown.Tags()["tensors"]}
    assert json.loads(texts["settings/text_summary"]) == settings
    environment = json.loads(texts["environment/text_summary"])
    assert {"torch", "python", "device", "host", "ranks", "config_hash"} <= set(environment)
    assert environment["command"] == "zerotrain train.max_steps=4"
    told = subprocess.run(["git", "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout
    assert environment["git_revision"] == told.strip()
    assert texts["status/text_summary"].strip() == "completed"
    results = {name: shown.Scalars(name)[-1] for name in shown.Tags()["scalars"] if name.startswith("result/")}
    assert (results["result/steps"].step, results["result/steps"].value) == (3, 3)
    assert results["result/final_val_loss"].value == pytest.approx(body["final_val_loss"], rel=1e-6)
    assert "result/memory_bytes.peak" in results
    assert all(len(shown.Scalars(name)) == 1 for name in results)
    groups = {name.partition("/")[0] for name in shown.Tags()["scalars"]}
    assert groups == {"train", "val", "perf", "result"}
    metadata = pytest.importorskip("tensorboard.plugins.hparams.metadata")
    told = {tag: shown.SummaryMetadata(tag).plugin_data.content for tag in shown.PluginTagToContent("hparams")}
    start = metadata.parse_session_start_info_plugin_data(told[metadata.SESSION_START_INFO_TAG])
    assert (start.hparams["zero.stage"].number_value, start.hparams["seed"].number_value) == (2, 3)
    assert start.hparams["zero.schedule"].string_value == "null"
    experiment = metadata.parse_experiment_plugin_data(told[metadata.EXPERIMENT_TAG])
    tags = {each.name.tag for each in experiment.metric_infos}
    assert {"result/final_val_loss", "result/final_train_loss", "result/memory_bytes.peak"} <= tags <= results.keys()
    names = [each.name for each in experiment.hparam_infos]
    assert names == ["train.max_steps", "zero.stage", "zero.schedule", "seed"]  # of the command line, then the others
    assert "-old = 1\n+new = '\ufffd'\n" in (tmp_path / "git.diff").read_text()


@pytest.mark.parametrize("is_same_folder", [True, False], ids=["the same folder", "another folder"])
def test_a_run_that_went_on_is_one_curve(make_trainer, tmp_path, lines_of, is_same_folder):
    pytest.importorskip("tensorboard")
    first = make_trainer(max_steps=3, eval_every=2, callbacks={"tensorboard": TensorBoard()}, checkpoint=EVERY_2)
    first.run()
    [taken] = checkpoints_in(tmp_path / "checkpoints")
    folder = tmp_path if is_same_folder else tmp_path / "second"
    folder.mkdir(exist_ok=True)
    policy = CheckpointPolicy(resume=[taken], at_end=False)
    callbacks = {"tensorboard": TensorBoard()}
    make_trainer(engine=first.engine, max_steps=5, callbacks=callbacks, checkpoint=policy, run_dir=folder).run()
    assert [step for step, _ in curves(folder)["train/loss"]] == [1, 2, 3, 4, 5]
    assert curves(folder) == lines_of(folder)
    assert "val/loss" in curves(folder)


def test_a_run_that_is_started_again_is_one_curve(make_trainer, tmp_path, lines_of):
    pytest.importorskip("tensorboard")
    for max_steps in (3, 2):
        make_trainer(max_steps=max_steps, callbacks={"tensorboard": TensorBoard()}).run()
    assert curves(tmp_path) == lines_of(tmp_path)
    assert [step for step, _ in curves(tmp_path)["train/loss"]] == [1, 2]


class Book(WandB):
    """A tracker in memory: {id: {name: [(step, value)]}}."""

    package = "json"

    def __init__(self, runs):
        super().__init__()
        self.runs, self.described, self.closed = runs, [], []

    def _open_run(self, run, run_id):
        self.id = run_id or f"{len(self.runs):08}"
        curves = self.runs.setdefault(self.id, defaultdict(list))
        return self.id, max((points[-1][0] for points in curves.values()), default=NO_POINTS)

    def _describe_run(self, run):
        self.described.append(run.settings)

    def _write(self, numbers, step):
        for name, value in numbers.items():
            self.runs[self.id][name].append((step, value))

    def _close_run(self, result, status):
        self.closed.append((status, result.get("result/steps")))


class Raising(Callback):
    """Raises after a step: the run fails, and its checkpoint is older."""

    def __init__(self, after):
        self.after = after

    def after_step(self, run, outcome):
        if run.step == self.after:
            raise RuntimeError("enough")


class Logging(Callback):
    def after_step(self, run, outcome):
        run.log({"nothing": None, "nan": math.nan, "text": "x", "flag": True})


class Broken(Book):
    def _open_run(self, run, run_id):
        raise OSError("no network")


class BrokenLater(Book):
    def _write(self, numbers, step):
        raise OSError("no network")

    _close_run = _write


@pytest.fixture
def train(make_trainer, tmp_path):
    trainers = []

    def run(book, *, folder="run", raise_after=None, stop=False, resume=None, config_hash="a", **changes):
        callbacks = {"book": book} | ({} if raise_after is None else {"raising": Raising(raise_after)})
        callbacks |= {"stopping": Stopping()} if stop else {}
        (tmp_path / folder).mkdir(exist_ok=True)
        policy = EVERY_2 if resume is None else CheckpointPolicy(every_steps=2, asynchronous=False, resume=[resume])
        engine = {"engine": trainers[0].engine} if trainers else {}
        given = {"run_facts": {"config_hash": config_hash}, "callbacks": callbacks, "checkpoint": policy}
        trainer = make_trainer(run_dir=tmp_path / folder, **{"max_steps": 5, **given, **engine, **changes})
        trainers.append(trainer)
        if raise_after is None:
            trainer.run()
        else:
            with pytest.raises(Exception, match="enough"):
                trainer.run()
        return tmp_path / folder

    return run


IDS = ["00000000", "00000001", "00000002"]


def steps_of(book, number=0):
    return [step for step, _ in book.runs[IDS[number]]["train/loss"]]


@pytest.mark.parametrize("other", ["run", "another"], ids=["the same folder", "another folder"])
def test_a_run_that_failed_and_went_on_is_one_run_there(train, curves_of, other):
    runs = {}
    folder = train(Book(runs), raise_after=3)
    [checkpoint] = checkpoints_in(folder / "checkpoints")
    book = Book(runs)
    folder = train(book, folder=other, resume=checkpoint)
    assert list(runs) == IDS[:1]
    assert steps_of(book) == [1, 2, 3, 4, 5]
    points = {name: [step for step, _ in each] for name, each in runs[IDS[0]].items()}
    assert points == {tag_of(name): [step for step, _ in each] for name, each in curves_of(folder).items()}
    assert json.loads((folder / "json.json").read_text()) == {"id": IDS[0], "config_hash": "a"}


def test_a_run_that_is_started_again_before_its_first_checkpoint_is_one_run_there(train):
    runs = {}
    train(Book(runs), raise_after=1)
    train(Book(runs))
    assert (list(runs), steps_of(Book(runs))) == (IDS[:1], [1, 2, 3, 4, 5])


def test_a_run_of_other_settings_leaves_points_that_it_has_not_come_to(train):
    runs = {}
    folder = train(Book(runs), raise_after=3)
    [checkpoint] = checkpoints_in(folder / "checkpoints")
    book = Book(runs)
    train(book, folder="another", resume=checkpoint, config_hash="b")
    assert (steps_of(book, 0), steps_of(book, 1)) == ([1, 2, 3], [1, 2, 3, 4, 5])
    assert book.closed[0] == (None, None)
    train(book := Book(runs), config_hash="c", checkpoint=None)  # from the beginning, in the folder of the first
    assert (list(runs), steps_of(book, 2)) == (IDS, [1, 2, 3, 4, 5])


def test_a_run_that_trains_longer_goes_on_there(train):
    runs = {}
    folder = train(Book(runs), max_steps=4)
    train(Book(runs), resume=checkpoints_in(folder / "checkpoints")[-1], config_hash="b", max_steps=6)
    assert (list(runs), steps_of(Book(runs))) == (IDS[:1], [1, 2, 3, 4, 5, 6])


def test_a_run_that_had_no_logger_so_far_brings_its_lines_along(train, curves_of):
    folder = train(Book({}), max_steps=2)
    runs = {}
    train(Book(runs), folder="another", resume=checkpoints_in(folder / "checkpoints")[-1])
    assert steps_of(Book(runs)) == [1, 2, 3, 4, 5]


def test_what_is_no_finite_number_is_left_out_and_the_end_is_told(make_trainer):
    book = Book({})
    settings = {"zero": {"stage": 2}}
    make_trainer(max_steps=1, callbacks={"book": book, "logging": Logging()}, settings=settings).run()
    assert not {"nothing", "nan", "text", "flag"} & set(book.runs[IDS[0]])
    assert book.described == [settings]
    assert book.closed == [("completed", 1)]


class Stopping(Callback):
    def ask(self, run):
        return Request(stop=run.step == 1)


def test_a_run_that_is_stopped_is_told_so_and_goes_on_there(train):
    runs = {}
    folder = train(book := Book(runs), stop=True)
    assert book.closed == [("stopped", 2)]
    train(book := Book(runs), resume=checkpoints_in(folder / "checkpoints")[-1])
    assert (list(runs), steps_of(book)) == (IDS[:1], [1, 2, 3, 4, 5])
    assert book.closed == [("completed", 5)]


@pytest.mark.parametrize(("broken", "moment"), [(Broken, "start"), (BrokenLater, "log")])
def test_a_tracker_that_breaks_only_warns(make_trainer, screen, broken, moment):
    body = make_trainer(max_steps=2, callbacks={"book": broken({})}).run()
    assert body["status"] == "completed"
    told = " ".join(screen.getvalue().split())
    assert told.count("no network") == 1
    assert f"callbacks.book: {moment}" in told


FORGED = [
    {},
    {"note": {"id": "12", "config_hash": None}},
    {"note": {"id": "../../x", "config_hash": None}},
    {"note": {"id": 1, "config_hash": None}},
    {"note": {"id": "00000001\n", "config_hash": None}},
    {"note": {"id": "00000001"}},
    {"note": ["1"]},
]


@pytest.mark.parametrize("state", FORGED, ids=str)
def test_an_id_of_another_form_is_refused(state):
    with pytest.raises(ValueError, match=r"must be|expected|missing"):
        Book({}).load_state_dict(state)


def test_a_note_in_the_folder_that_cannot_be_read_is_not_followed(train, tmp_path):
    for text in ("", "[" * 100_000, '{"id": "../x", "config_hash": "a"}', "x" * 5000):
        (tmp_path / "run").mkdir(exist_ok=True)
        (tmp_path / "run/json.json").write_text(text)
        book = Book({})
        train(book, max_steps=1)
        assert list(book.runs) == IDS[:1]


@pytest.mark.parametrize("logger", [TensorBoard, WandB])
def test_without_a_package_a_logger_says_what_to_install(logger, monkeypatch):
    monkeypatch.setattr("zerotrain.training.callbacks.loggers.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=rf"pip install 'zerotrain\[{logger.package}\]' brings it"):
        logger()


# A run at Weights & Biases without a network, as wandb's own reader has the files.


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
    assert curves_at(file_of(tmp_path)) == {tag_of(name): points for name, points in curves_of(tmp_path).items()}
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


def test_a_run_that_fails_is_told_so(make_trainer, tmp_path):
    callbacks = {"wandb": WandB(mode="offline"), "raising": Raising(1)}
    with pytest.raises(Exception, match="enough"):
        make_trainer(max_steps=3, callbacks=callbacks).run()
    said = json.loads(inspected(file_of(tmp_path), "--summary"))
    assert (said["exit_code"], said["summary"]["status"]) == (1, "failed")


def test_without_a_login_it_only_warns(make_trainer, screen, monkeypatch, tmp_path):
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    assert make_trainer(max_steps=1, callbacks={"wandb": WandB(mode="online")}).run()["status"] == "completed"
    assert "callbacks.wandb: start after step 0" in " ".join(screen.getvalue().split())


def test_a_mode_that_there_is_not_is_refused():
    with pytest.raises(ValueError, match=r"mode=on; it must be online, offline, disabled or null"):
        WandB(mode="on")
