"""A run is one at a tracker, whose id no file can forge, and which may break."""

import json
import math
import subprocess
from collections import defaultdict

import pytest

from zerotrain.checkpoint import checkpoints_in
from zerotrain.training import Callback, Request
from zerotrain.training.callbacks.checkpoints import CheckpointPolicy
from zerotrain.training.callbacks.loggers import Tracker, WandB, Written, facts_of, uncommitted_changes

EVERY_2 = CheckpointPolicy(every_steps=2, asynchronous=False, at_end=False)


class Book(Tracker):
    """A tracker in memory: {id: {name: [(step, value)]}}."""

    package = "json"
    id_pattern = "[0-9]"

    def __init__(self, runs):
        super().__init__()
        self.runs, self.described, self.closed, self.kept = runs, [], [], []

    def _open_run(self, run, run_id):
        self.id = run_id or str(len(self.runs))
        curves = self.runs.setdefault(self.id, defaultdict(list))
        return self.id, Written(by_name={name: points[-1][0] for name, points in curves.items()})

    def _describe_run(self, run):
        self.described.append(run.settings)

    def _write(self, numbers, step):
        for name, value in numbers.items():
            self.runs[self.id][name].append((step, value))

    def _keep_file(self, path):
        self.kept.append(path)

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
    """Breaks at each moment."""

    def _open_run(self, run, run_id):
        raise OSError("no network")


class BrokenLater(Book):
    def _write(self, numbers, step):
        raise OSError("no network")

    _close_run = _write


@pytest.fixture
def train(make_trainer, tmp_path):
    """Trains in the folder of a name."""
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


def steps_of(book, run_id="0"):
    return [step for step, _ in book.runs[run_id]["train_loss"]]


@pytest.mark.parametrize("other", ["run", "another"], ids=["the same folder", "another folder"])
def test_a_run_that_failed_and_went_on_is_one_run_there(train, curves_of, other):
    runs = {}
    folder = train(Book(runs), raise_after=3)
    [checkpoint] = checkpoints_in(folder / "checkpoints")
    book = Book(runs)
    folder = train(book, folder=other, resume=checkpoint)
    assert list(runs) == ["0"]
    assert steps_of(book) == [1, 2, 3, 4, 5]
    points = {name: [step for step, _ in each] for name, each in runs["0"].items()}
    assert points == {name: [step for step, _ in each] for name, each in curves_of(folder).items()}
    assert json.loads((folder / "json.json").read_text()) == {"id": "0", "config_hash": "a"}


def test_a_run_that_is_started_again_before_its_first_checkpoint_is_one_run_there(train):
    runs = {}
    train(Book(runs), raise_after=1)
    train(Book(runs))
    assert (list(runs), steps_of(Book(runs))) == (["0"], [1, 2, 3, 4, 5])


def test_a_run_of_other_settings_leaves_points_that_it_has_not_come_to(train):
    runs = {}
    folder = train(Book(runs), raise_after=3)
    [checkpoint] = checkpoints_in(folder / "checkpoints")
    book = Book(runs)
    train(book, folder="another", resume=checkpoint, config_hash="b")
    assert (steps_of(book, "0"), steps_of(book, "1")) == ([1, 2, 3], [1, 2, 3, 4, 5])
    assert book.closed[0] == (None, None)
    train(book := Book(runs), config_hash="c", checkpoint=None)  # from the beginning, in the folder of the first
    assert (list(runs), steps_of(book, "2")) == (["0", "1", "2"], [1, 2, 3, 4, 5])


def test_a_run_that_trains_longer_goes_on_there(train):
    runs = {}
    folder = train(Book(runs), max_steps=4)
    train(Book(runs), resume=checkpoints_in(folder / "checkpoints")[-1], config_hash="b", max_steps=6)
    assert (list(runs), steps_of(Book(runs))) == (["0"], [1, 2, 3, 4, 5, 6])


def test_a_run_that_had_no_logger_so_far_brings_its_lines_along(train, curves_of):
    folder = train(Book({}), max_steps=2)
    runs = {}
    train(Book(runs), folder="another", resume=checkpoints_in(folder / "checkpoints")[-1])
    assert steps_of(Book(runs)) == [1, 2, 3, 4, 5]


def test_what_is_no_finite_number_is_left_out_and_the_end_is_told(make_trainer):
    book = Book({})
    settings = {"zero": {"stage": 2}}
    make_trainer(max_steps=1, callbacks={"book": book, "logging": Logging()}, settings=settings).run()
    assert not {"nothing", "nan", "text", "flag"} & set(book.runs["0"])
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
    assert (list(runs), steps_of(book)) == (["0"], [1, 2, 3, 4, 5])
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
    {"note": {"id": "1\n", "config_hash": None}},
    {"note": {"id": "1"}},
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
        assert list(book.runs) == ["0"]


def test_the_state_is_what_a_checkpoint_can_hold():
    book = Book({})
    assert json.loads(json.dumps(book.state_dict())) == {"note": None}
    again = Book({})
    again.load_state_dict({"note": {"id": "7", "config_hash": None}})
    assert again.state_dict() == {"note": {"id": "7", "config_hash": None}}


class Facts(Callback):
    def start(self, run):
        self.facts = facts_of(run)


def test_the_facts_of_a_run_name_its_code_and_its_machine(make_trainer, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    callback = Facts()
    make_trainer(max_steps=1, callbacks={"facts": callback}).run()
    assert callback.facts["command"] == "python -m zerotrain train.max_steps=4"
    assert {"torch", "python", "device", "host", "ranks", "config_hash"} <= set(callback.facts)
    assert "git_revision" not in callback.facts
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b.c"]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "first"], check=True)
    make_trainer(max_steps=1, callbacks={"facts": callback}).run()
    told = subprocess.run(["git", "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout
    assert callback.facts["git_revision"] == told.strip()


def test_changes_that_no_commit_has_lie_in_the_folder_and_at_the_tracker(make_trainer, changed_code, tmp_path):
    book = Book({})
    make_trainer(max_steps=1, callbacks={"book": book}).run()
    assert book.kept == [tmp_path / "git.diff"]
    assert "-old = 1\n+new = '\ufffd'\n" in (tmp_path / "git.diff").read_text()
    subprocess.run(["git", "checkout", "-q", "."], check=True)
    assert uncommitted_changes() == ""


def test_without_a_package_a_logger_says_what_to_install(monkeypatch):
    monkeypatch.setattr("zerotrain.training.callbacks.loggers.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"pip install 'zerotrain\[wandb\]' brings it"):
        WandB()
