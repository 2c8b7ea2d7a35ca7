"""The moments of a run: when they come, in which order, and what becomes of a callback that raises."""

import math

import pytest

from tests.unit.training.runs import lines_in, result_in
from zerotrain.checkpoint import checkpoints_in
from zerotrain.errors import CallbackError, CheckpointError, ConfigError
from zerotrain.training import Callback, Request
from zerotrain.training.callbacks.checkpoints import CheckpointPolicy
from zerotrain.training.callbacks.early_stopping import EarlyStopping

MOMENTS = [name for name in vars(Callback) if not name.startswith("_") and callable(getattr(Callback, name))]
IN_A_RUN = [name for name in MOMENTS if name not in ("after_stage_change", "failure", "load_state_dict")]


class Witness(Callback):
    """Notes the moments in a list that it may share, and does something at one of them."""

    def __init__(self, name="", seen=None, at="", action=None):
        self.name, self.seen, self.at, self.action = name, [] if seen is None else seen, at, action

    def note(self, moment, run, *arguments):
        self.seen.append((moment, self.name, None if run is None else run.step))
        if moment == self.at:
            return self.action() if run is None else self.action(run, *arguments)
        return {} if moment == "state_dict" else None


def noting(moment):
    if moment.endswith("state_dict"):
        return lambda self, *arguments: self.note(moment, None)
    return lambda self, run, *arguments: self.note(moment, run, *arguments)


for moment in MOMENTS:
    setattr(Witness, moment, noting(moment))


class FirstRank(Witness):
    ranks = "first"


class MayFail(Witness):
    ranks, may_fail = "first", True


class Total(Callback):
    def __init__(self):
        self.total, self.loaded = 0, None

    def after_step(self, run, outcome):
        self.total += run.step

    def state_dict(self):
        return {"total": self.total}

    def load_state_dict(self, state):
        self.total, self.loaded = state["total"], state


def fail(*_):
    raise ValueError("no [luck]\nat all")


EVERY_2 = CheckpointPolicy(every_steps=2, asynchronous=False)


# ---- when the moments come


def test_all_moments_come_in_the_order_of_the_steps(make_trainer):
    seen = []
    changing = Witness(seen=seen, at="ask", action=lambda run: Request(stage=3) if run.step == 1 else None)
    make_trainer(max_steps=3, log_every=2, eval_every=2, callbacks={"a": changing}, checkpoint=EVERY_2).run()
    assert [(name, step) for name, _, step in seen] == [
        ("prepare", 0), ("start", 0), ("log", 0), ("after_evaluation", 0),
        ("before_step", 0), ("ask", 0), ("log", 1), ("after_step", 1),
        ("before_step", 1), ("ask", 1), ("log", 2), ("log", 2), ("after_stage_change", 2), ("after_step", 2),
        ("log", 2), ("after_evaluation", 2), ("before_save", 2), ("state_dict", None), ("after_save", 2),
        ("before_step", 2), ("ask", 2), ("log", 3), ("after_step", 3), ("log", 3), ("after_evaluation", 3),
        ("before_save", 3), ("state_dict", None), ("after_save", 3), ("end", 3), ("completed", 3),
    ]  # fmt: skip


def test_callbacks_start_in_their_order_and_end_in_the_reverse(make_trainer):
    seen = []
    make_trainer(max_steps=1, callbacks={name: Witness(name, seen) for name in "cab"}).run()
    for moment, order in (("start", "cab"), ("after_step", "cab"), ("end", "bac"), ("completed", "cab")):
        assert "".join(name for each, name, _ in seen if each == moment) == order


def test_what_a_callback_logs_is_in_the_file_from_its_start_to_its_end(make_trainer, tmp_path):
    class Logging(Callback):
        def start(self, run):
            run.log({"at_start": 1})

        def end(self, run):
            run.log({"at_end": math.nan})

    make_trainer(max_steps=1, callbacks={"a": Logging()}).run()
    first, *_, last = lines_in(tmp_path)
    assert (first, last) == ({"step": 0, "at_start": 1}, {"step": 1, "at_end": None})


# ---- a wish


def test_a_callback_may_stop_the_run_and_is_named(make_trainer, tmp_path):
    seen = []
    stopping = Witness(seen=seen, at="ask", action=lambda run: Request(stop=run.step == 2))
    make_trainer(max_steps=9, callbacks={"enough": stopping}, checkpoint=CheckpointPolicy()).run()
    result = result_in(tmp_path)
    assert (result["status"], result["stopped_by"], result["steps"]) == ("stopped", "callbacks.enough", 3)
    assert result["error"] == "stopped by callbacks.enough after step 3 of 9"
    assert [path.name for path in checkpoints_in(tmp_path / "checkpoints")] == ["step-00000003"]
    assert [name for name, _, _ in seen][-3:] == ["state_dict", "after_save", "end"]


def test_a_callback_may_have_a_step_saved(make_trainer, tmp_path):
    saving = Witness(at="ask", action=lambda run: Request(save=run.step in (1, 3)))
    make_trainer(max_steps=5, callbacks={"a": saving}, checkpoint=CheckpointPolicy(at_end=False)).run()
    assert {path.name for path in checkpoints_in(tmp_path / "checkpoints")} == {"step-00000002", "step-00000004"}


# ---- one that raises


@pytest.mark.parametrize("moment", IN_A_RUN)
def test_one_that_raises_ends_the_run_with_its_name_and_the_moment(make_trainer, tmp_path, moment):
    seen = []
    callbacks = {"first": Witness("first", seen), "bad": Witness("bad", seen, at=moment, action=fail)}
    trainer = make_trainer(max_steps=2, callbacks=callbacks, checkpoint=CheckpointPolicy())
    with pytest.raises(
        CallbackError, match=rf"^callbacks\.bad: {moment}( after step \d)?: ValueError: no \[luck\]"
    ) as caught:
        trainer.run()
    assert isinstance(caught.value.__cause__, ValueError)
    result = result_in(tmp_path)
    if moment == "completed":  # the run is done, and its result on the disk
        assert result["status"] == "completed"
        return
    assert result["status"] == "failed"
    assert result["error"].startswith(f"CallbackError: callbacks.bad: {moment}")
    told = ["bad", "first"] if moment != "prepare" else []  # where none has started
    assert [name for each, name, _ in seen if each == "failure"] == told


def test_one_that_raises_when_the_run_has_failed_does_not_hide_the_cause(make_trainer, tmp_path, screen):
    callbacks = {"bad": Witness(at="failure", action=fail), "worse": Witness(at="before_step", action=fail)}
    with pytest.raises(CallbackError, match=r"callbacks\.worse: before_step after step 0"):
        make_trainer(callbacks=callbacks).run()
    assert "callbacks.worse: before_step" in result_in(tmp_path)["error"]
    assert "warning: CallbackError: callbacks.bad: failure after step 0: ValueError: no [luck]" in screen.getvalue()


def test_one_that_ends_the_process_is_named_too(make_trainer, tmp_path):
    with pytest.raises(CallbackError, match=r"callbacks\.bad: after_step after step 1: SystemExit: 3"):
        make_trainer(callbacks={"bad": Witness(at="after_step", action=lambda *_: exit(3))}).run()
    assert result_in(tmp_path)["status"] == "failed"


@pytest.mark.parametrize(
    ("moment", "given", "said"),
    [
        ("ask", 3, "it returned a int; it must return a Request or None"),
        ("state_dict", [1], "it returned a list; it must return a dict"),
        ("state_dict", {"a": {1}}, "Object of type set is not JSON serializable"),
        ("state_dict", {"a": math.inf}, "Out of range float values are not JSON compliant"),
    ],
    ids=str,
)
def test_what_no_moment_can_give_is_refused_by_name(make_trainer, moment, given, said):
    bad = Witness(at=moment, action=lambda *_: given)
    with pytest.raises(CallbackError, match=rf"callbacks\.bad: {moment}.*{said}"):
        make_trainer(max_steps=1, callbacks={"bad": bad}, checkpoint=CheckpointPolicy()).run()


@pytest.mark.parametrize("moment", IN_A_RUN)
def test_one_that_may_fail_warns_once_and_nothing_is_lost(make_trainer, tmp_path, screen, moment):
    bad = MayFail(at=moment, action=fail)
    callbacks = {"bad": bad, "good": Witness()}
    body = make_trainer(max_steps=3, callbacks=callbacks, checkpoint=EVERY_2).run()
    assert (body["status"], body["steps"]) == ("completed", 3)
    assert [line["step"] for line in lines_in(tmp_path, "train_loss")] == [1, 2, 3]
    assert screen.getvalue().count("warning: ") == 1
    assert f"warning: callbacks.bad: {moment}" in screen.getvalue()
    assert bad.seen == callbacks["good"].seen


class OnAllRanks(Callback):
    may_fail = True


@pytest.mark.parametrize(
    ("callback", "problem"),
    [
        (OnAllRanks(), "has may_fail=True and runs on all ranks"),
        ({}, r"is a dict, and no zerotrain\.training\.Callback"),
    ],
    ids=["one of all ranks that may fail", "no callback"],
)
def test_what_cannot_be_a_callback_is_refused(make_trainer, callback, problem):
    with pytest.raises(ConfigError, match=rf"callbacks\.a: {problem}"):
        make_trainer(callbacks={"a": callback})


def test_a_callback_that_has_not_started_is_told_of_no_failure(make_trainer):
    late, bad = Witness(), Witness(at="start", action=fail)
    with pytest.raises(CallbackError):
        make_trainer(callbacks={"bad": bad, "late": late}).run()
    assert [name for name, _, _ in bad.seen] == ["prepare", "start", "failure"]
    assert [name for name, _, _ in late.seen] == ["prepare"]


# ---- state


def test_state_goes_on_from_a_checkpoint(make_trainer, tmp_path, model):
    first = make_trainer(max_steps=4, callbacks={"total": Total(), "idle": Witness()}, checkpoint=EVERY_2)
    first.run()
    [*_, newest] = checkpoints_in(tmp_path / "checkpoints")
    taken = checkpoints_in(tmp_path / "checkpoints")[0]
    assert newest.name == "step-00000004"
    total, new = Total(), Total()
    policy = CheckpointPolicy(resume=[taken], at_end=False)
    make_trainer(engine=first.engine, max_steps=4, callbacks={"total": total, "new": new}, checkpoint=policy).run()
    assert total.loaded == {"total": 3}
    assert total.total == 10
    assert (new.loaded, new.total) == (None, 7)


@pytest.mark.parametrize(
    ("saved", "loads", "error", "problem"),
    [
        ({}, EarlyStopping(patience=1), CallbackError, r"callbacks\.a: load_state_dict: UntrustedFileError: best is"),
        ({"callbacks": {"a": [3]}}, Total(), CheckpointError, r"run\.callbacks.*: got a list; it must be a mapping"),
    ],
    ids=["of another callback", "of no form that a run writes"],
)
def test_state_that_nobody_can_take_ends_the_run(make_trainer, tmp_path, saved, loads, error, problem):
    first = make_trainer(max_steps=2, callbacks={"a": Total()}, checkpoint=EVERY_2)
    state = first._state
    first._state = lambda: state() | saved
    first.run()
    policy = CheckpointPolicy(resume=checkpoints_in(tmp_path / "checkpoints"), at_end=False)
    with pytest.raises(error, match=problem):
        make_trainer(engine=first.engine, max_steps=3, callbacks={"a": loads}, checkpoint=policy).run()
