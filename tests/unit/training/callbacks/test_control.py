"""What an operator asks of a run that is under way."""

import errno
import io
import os
import stat
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from rich.console import Console

import zerotrain
from zerotrain.comm.world import World
from zerotrain.models import GPT
from zerotrain.training.callbacks import stages as control_module
from zerotrain.training.callbacks.checkpoints import CheckpointPolicy
from zerotrain.training.callbacks.stages import Control
from zerotrain.training.request import SAVE, STOP, Request, decoded


@pytest.fixture
def run(make_trainer: Callable[..., Any], tmp_path: Path, screen: Any) -> Callable[..., tuple[Any, Any, str]]:
    """Runs twelve steps, of which some begin with a text in control.yaml; (trainer, result, what was answered)."""

    def begin(asked: dict[int, str], name: str = "run", **changes: Any) -> tuple[Any, Any, str]:
        run_dir = tmp_path / name
        run_dir.mkdir(exist_ok=True)
        control = run_dir / "control.yaml"
        answers: list[str] = []

        def write(step: int) -> None:
            if control.exists():
                answers.append(control.read_text())
            if step in asked:
                control.write_text(asked[step])

        torch.manual_seed(0)
        model = GPT(vocab_size=32, max_seq_len=16, num_layers=2, num_heads=2, hidden_size=32)
        engine = zerotrain.build_engine(model, optimizer=partial(torch.optim.AdamW, lr=1e-2))
        settings = {
            "engine": engine,
            "run_dir": run_dir,
            "max_steps": 12,
            "checkpoint": CheckpointPolicy(at_end=False, keep=None),
        }
        trainer = make_trainer(**settings | {"begin": write} | changes)
        body = trainer.run()
        return trainer, body, control.read_text() if control.exists() else ""

    return begin


@pytest.mark.case(
    "stopping",
    "`control.yaml` asks for a stage, a save or a stop",
    "done after the step, to the same bits; answered in the file and the log; a run that goes on keeps the stage",
)
def test_a_stage_that_is_asked_for_is_that_of_the_next_step_and_the_bits_are_those_of_any(run, screen):
    _, wanted, _ = run({}, "whole")
    trainer, body, answer = run({3: "stage: 3\n", 7: "stage: 0\n"})
    assert body["weights_sha256"] == wanted["weights_sha256"]
    assert [(each["stage"], each["from_step"]) for each in body["stages"]] == [(2, 0), (3, 3), (0, 7)]
    assert yaml.safe_load(answer) == {"answer": ["stage: 0 after step 7"]}
    assert "control.yaml: stage: 3 after step 3" in screen.getvalue()
    assert trainer.engine.options.zero.stage == 0


def test_what_is_asked_for_holds_until_the_next_entry_of_the_schedule_and_over_one_of_its_own_step(run):
    _, body, _ = run({4: "stage: 3\n", 6: "stage: 0\n"}, stages={0: 2, 6: 1, 9: 2})
    assert [(each["stage"], each["from_step"]) for each in body["stages"]] == [(2, 0), (3, 4), (0, 6), (2, 9)]


@pytest.mark.case("stopping", "`control.yaml` asks for a stage, a save or a stop")
def test_a_save_is_made_once(run):
    trainer, _, answer = run({5: "save: now"})
    assert [path.name for path in (trainer.run_dir / "checkpoints").iterdir()] == ["step-00000005"]
    assert yaml.safe_load(answer) == {"answer": ["save: step-00000005 is written beside the training"]}


@pytest.mark.case("stopping", "`control.yaml` asks for a stage, a save or a stop")
def test_a_stop_saves_and_the_run_goes_on_at_the_stage_that_was_asked_for(run, make_trainer):
    _, wanted, _ = run({}, "whole")
    trainer, body, answer = run({4: "stop: true\nstage: 1\n"})
    assert (body["status"], body["stopped_by"], body["steps"]) == ("stopped", "control.yaml", 4)
    assert len(yaml.safe_load(answer)["answer"]) == 2
    newest = trainer.run_dir / "checkpoints/step-00000004"
    again, body, _ = run({}, "again", checkpoint=CheckpointPolicy(at_end=False, resume=[newest]))
    assert body["weights_sha256"] == wanted["weights_sha256"]
    assert again.engine.options.zero.stage == 1


@pytest.mark.case(
    "stopping",
    "what cannot be, or no yaml",
    "answered; the run goes on",
    under="`control.yaml` asks for a stage, a save or a stop",
)
@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("stage: 7", "stage: got 7; it must be 0, 1, 2 or 3"),
        ("stage: true", "stage: got True; it must be 0, 1, 2 or 3"),
        ("save: later", "save: got 'later'; it must be now"),
        ("stop: 1", "stop: got 1; it must be true"),
        ("stagee: 3", "stagee: there is no such request; there are stage: 0 to 3, save: now, stop: true"),
        ("stage", "it has no key and value; write stage: 0 to 3, save: now, stop: true"),
    ],
)
def test_what_cannot_be_is_answered_and_the_run_goes_on(run, asked, said):
    _, body, answer = run({2: asked})
    assert (body["status"], body["steps"], len(body["stages"])) == ("completed", 12, 1)
    assert yaml.safe_load(answer) == {"answer": [said]}


@pytest.mark.case("stopping", "what cannot be, or no yaml", under="`control.yaml` asks for a stage, a save or a stop")
def test_no_yaml_is_answered_and_what_is_right_beside_what_is_wrong_is_done(run):
    _, body, answer = run({2: "stage: [3", 6: "stage: 3\nsave: later\n"})
    assert body["stages"][-1]["stage"] == 3
    assert yaml.safe_load(answer) == {"answer": ["stage: 3 after step 6", "save: got 'later'; it must be now"]}


def test_an_empty_file_and_an_answer_ask_for_nothing(run):
    _, body, answer = run({2: "", 4: "answer: [done]\n"})
    assert body["status"] == "completed"
    assert answer == "answer: [done]\n"


def test_the_numbers_that_travel_are_told_apart():
    for stage in range(4):
        assert decoded([15 + SAVE + (stage + 1) * (SAVE << 1) + STOP, 0]).stage == stage
    assert decoded([15 + SAVE + STOP, 0]).stage is None
    assert decoded([STOP, 0]).stopped_by == "control.yaml"
    assert decoded([STOP, 15]).stopped_by == "SIGTERM"
    assert decoded([SAVE + (SAVE << 1), 0]).stopped_by is None


def test_an_answer_that_cannot_be_written_is_said_whatever_the_run_is_called(run, screen, monkeypatch, tmp_path):
    def refuse(source: Path, target: Path) -> None:
        if Path(target).name == "control.yaml":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(source, target)

    real = os.replace
    monkeypatch.setattr(os, "replace", refuse)
    (tmp_path / "zero.units=[blocks.*] [").mkdir()
    name = "zero.units=[blocks.*] [/b]"  # a tag that nothing has opened: rich refused it, and rank 0 ended (2026-11-22)
    _, body, _ = run({3: "stage: 3\n"}, name)
    assert body["steps"] == 12
    assert (
        f"warning: the answer cannot be written to {tmp_path / name / 'control.yaml'}: No space left on device"
        in screen.getvalue()
    )


@pytest.fixture
def control(tmp_path: Path, world: World, screen: io.StringIO) -> Control:
    return Control(tmp_path / "control.yaml", world, Console(file=screen, width=1000))


BILLION_LAUGHS = "a0: &a0 [lol]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12))
UNREADABLE = {
    "a number that is none": ("stage: 0b_", "it cannot be read: invalid literal for int() with base 2"),
    "a number of 5,000 digits": ("stage: " + "9" * 5000, "it cannot be read: Exceeds the limit"),
    "a tag": ("stage: !!int x", "it cannot be read: line 1 has a tag (!)"),
    "a tag that runs something": ("a: !!python/object/apply:os.system [ls]", "it cannot be read: line 1 has a tag (!)"),
    "aliases": (BILLION_LAUGHS, "it cannot be read: line 1 has an anchor (&) or an alias (*)"),
    "an alias of nothing": ("stage: *x", "it cannot be read: line 1 has an anchor (&) or an alias (*)"),
    "depth": ("[" * 2000, "it cannot be read: its lists and mappings are nested more than 64 deep"),
    "two of a name": ("stage: 1\nstage: 3", "it cannot be read: stage is there twice"),
    "a key of lists": ("? [stage]\n: 3", "it cannot be read: a key is a list or a mapping"),
    "two documents": ("stage: 3\n---\nstage: 2\n", "it cannot be read: expected a single document"),
    "a version of later": ("%YAML 9.9\n---\nstage: 3", "it cannot be read: found incompatible YAML document"),
    "no text": (b"stage: \xff\xfe", "it cannot be read: 'utf-8' codec can't decode byte 0xff"),
    "a null byte": (b"stage: \x00", "it cannot be read: unacceptable character #x0000"),
    "a date": ("stage: 2026-11-23", "stage: got '2026-11-23'; it must be 0, 1, 2 or 3"),
    "a date as a key": ("2026-11-23: 3", "2026-11-23: there is no such request"),
    "a list": ("stage: [3]", "stage: got [3]; it must be 0, 1, 2 or 3"),
    "a half of a character": ('stage: "\\ud800"', "stage: got '\\ud800'; it must be 0, 1, 2 or 3"),
    "a half of a character as a key": ('"\\ud800": 3', "\\ud800: there is no such request"),
    "escapes of a terminal": ('"\\e[2J\\u202e": 3', "\\x1b[2J\\u202e: there is no such request"),
    "a line that forges another": ('"a\\nanswer": 3', "a\\nanswer: there is no such request"),
    "one that means true": ("save: 1", "save: got 1; it must be now"),
    "a fraction": ("stage: 3.0", "stage: got 3.0; it must be 0, 1, 2 or 3"),
    "a long text": ("stage: " + "x" * 60_000, "stage: got 'xxxxxxxx"),
    "200 MB": (None, "it cannot be read: it has more than the 65,536 bytes that are allowed here; write stage"),
}


@pytest.mark.parametrize("case", UNREADABLE)
def test_whatever_it_holds_is_answered_in_yaml_that_a_terminal_can_take(control, tmp_path, screen, case):
    content, said = UNREADABLE[case]
    path = tmp_path / "control.yaml"
    if content is None:
        path.touch()
        os.truncate(path, 200 * 10**6)
    else:
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    assert control.look() == Request()
    control.answer(1)
    [answer] = yaml.safe_load(path.read_text())["answer"]
    assert answer.startswith(said)
    assert answer.isprintable()
    assert len(answer) < 700
    assert screen.getvalue() == f"control.yaml: {answer}\n"
    assert control.look() == Request()


def test_of_many_mistakes_the_first_are_told(control, tmp_path):
    (tmp_path / "control.yaml").write_text("".join(f"key{number}: 1\n" for number in range(500)) + "stage: 3\n")
    assert control.look().stage == 3
    control.answer(1)
    answers = yaml.safe_load((tmp_path / "control.yaml").read_text())["answer"]
    assert (len(answers), answers[0], answers[-1]) == (12, "stage: 3 after step 1", "and 490 more that are wrong")


def make_fifo(path: Path) -> None:
    os.mkfifo(path)


def make_socket(path: Path) -> None:
    os.mknod(path, stat.S_IFSOCK | 0o600)


def link_to(target: str) -> Callable[[Path], None]:
    return lambda path: path.symlink_to(target)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (make_fifo, "it is a FIFO, and must be a regular file"),
        (make_socket, "it is a socket, and must be a regular file"),
        (link_to("/dev/zero"), "it is a device, and must be a regular file"),
        (link_to("control.yaml"), "Too many levels of symbolic links"),
        (link_to("nothing"), "No such file or directory"),
        (link_to("."), "it is a folder, and must be a regular file"),
    ],
    ids=["FIFO", "socket", "device", "loop", "link to nothing", "link to a folder"],
)
def test_what_is_no_file_is_answered_in_its_place_and_nobody_waits(control, tmp_path, make, said):
    path = tmp_path / "control.yaml"
    make(path)
    assert control.look() == Request()
    control.answer(1)
    assert yaml.safe_load(path.read_text()) == {
        "answer": [f"it cannot be read: {said}; write stage: 0 to 3, save: now, stop: true"]
    }
    assert path.is_file()
    assert not path.is_symlink()
    assert control.look() == Request()


def test_a_folder_is_answered_in_the_log_once_and_stays(control, tmp_path, screen):
    path = tmp_path / "control.yaml"
    path.mkdir()
    for step in range(1, 4):
        assert control.look() == Request()
        control.answer(step)
    assert path.is_dir()
    refused, warning = screen.getvalue().splitlines()
    assert refused.startswith("control.yaml: it cannot be read: it is a folder, and must be a regular file; write")
    assert warning == f"warning: the answer cannot be written to {path}: Is a directory"
    assert [each.name for each in tmp_path.iterdir()] == ["control.yaml"]


def test_a_file_that_may_not_be_read_is_answered(control, tmp_path, monkeypatch):
    def refuse(path: Any, flags: int, *more: Any, **named: Any) -> int:
        if os.fspath(path) == str(tmp_path / "control.yaml"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return real(path, flags, *more, **named)

    real = os.open
    (tmp_path / "control.yaml").write_text("stage: 3")
    monkeypatch.setattr(os, "open", refuse)  # the tests may run as root, who may read it
    assert control.look() == Request()
    control.answer(1)
    monkeypatch.undo()
    assert "it cannot be read: Permission denied" in (tmp_path / "control.yaml").read_text()


@pytest.mark.parametrize("rank", [1, 3])
def test_other_ranks_look_at_nothing(tmp_path, screen, monkeypatch, rank):
    control = Control(tmp_path / "control.yaml", World(rank, 4, rank, torch.device("cpu")), Console(file=screen))
    (tmp_path / "control.yaml").write_text("stage: 3\nnonsense: 1\n")
    assert control.look() == Request()
    control.answer(1)
    assert (tmp_path / "control.yaml").read_text() == "stage: 3\nnonsense: 1\n"
    assert screen.getvalue() == ""


@pytest.mark.parametrize("meanwhile", ["gone", "other"])
def test_a_file_that_goes_or_changes_while_it_is_read_is_left_for_the_next_look(
    control, tmp_path, monkeypatch, meanwhile
):
    def read(path: Path, *, max_nbytes: int) -> bytes:
        content = real(path, max_nbytes=max_nbytes)
        path.unlink() if meanwhile == "gone" else path.write_text("stage: 1\nsave: now\n")
        return content

    real = control_module.read_regular
    (tmp_path / "control.yaml").write_text("stage: 3\n")
    with monkeypatch.context() as patch:
        patch.setattr(control_module, "read_regular", read)
        assert control.look() == Request()
        control.answer(1)
    if meanwhile == "gone":
        assert control.look() == Request()
        assert list(tmp_path.iterdir()) == []
    else:
        assert (asked := control.look()).stage == 1
        assert asked.save
        control.answer(2)
        assert len(yaml.safe_load((tmp_path / "control.yaml").read_text())["answer"]) == 2


def test_a_request_that_comes_before_the_answer_to_another_is_done_too(control, tmp_path, screen):
    path = tmp_path / "control.yaml"
    path.write_text("stage: 3\n")
    assert control.look().stage == 3
    path.write_text("stop: true\n")
    control.answer(1)
    assert screen.getvalue() == "control.yaml: stage: 3 after step 1\n"
    assert control.look() == Request(stop="control.yaml")
    control.answer(2)
    assert yaml.safe_load(path.read_text()) == {"answer": ["stop: after step 2, saved"]}


def test_what_lies_where_an_answer_is_prepared_is_neither_waited_for_nor_written_through(
    control, tmp_path, monkeypatch
):
    monkeypatch.setattr("secrets.token_hex", lambda _: "0")
    path, temporary = tmp_path / "control.yaml", tmp_path / "control.yaml.0.tmp"
    for step, make in enumerate([make_fifo, link_to("mine")], 1):
        (tmp_path / "mine").write_text("kept")
        make(temporary)
        path.write_text(f"stage: {step}\n")
        assert control.look().stage == step
        control.answer(step)
        assert yaml.safe_load(path.read_text()) == {"answer": [f"stage: {step} after step {step}"]}
    assert (tmp_path / "mine").read_text() == "kept"


def test_a_run_goes_on_to_its_bits_whatever_is_put_there(run, screen):
    _, wanted, _ = run({}, "whole")
    _, body, answer = run({2: "stage: 2026-11-23", 4: BILLION_LAUGHS, 6: "[" * 2000, 8: "stage: 3\nx: 0b\n"})
    assert (body["status"], body["weights_sha256"]) == ("completed", wanted["weights_sha256"])
    assert yaml.safe_load(answer)["answer"][0] == "stage: 3 after step 8"
    assert screen.getvalue().count("\ncontrol.yaml: ") == 4
