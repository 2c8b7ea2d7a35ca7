"""A run whose output nobody reads any more goes on to its end; no command has a traceback for output that fails."""

import shutil
import sys
from pathlib import Path

import pytest
from commands import ON_TWO_RANKS, REPOSITORY, TINY, Command, result_of

from tests.zygote.client import Zygote
from tests.zygote.server import CLOSED_PIPE

HAND = (sys.executable, str(REPOSITORY / "launch.py"))
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", *ON_TWO_RANKS, str(REPOSITORY / "launch.py"))


def in_shell(line: str, *command: str, folder: Path) -> Command:
    """A command as "$@" of a line of the shell."""
    return Command(["sh", "-c", line, "sh", *command], folder)


@pytest.mark.parametrize("line", ['{ "$@"; echo $? > code; } | head -1', '"$@" >&- 2>&-; echo $? > code'])
def test_a_run_goes_on_when_its_output_is_closed(tmp_path: Path, line: str):
    run = (*TINY, "train.max_steps=30", "hydra.run.dir=run", "launch.nproc_per_node=2")
    command = in_shell(line, *HAND, *run, folder=tmp_path)
    command.wait()
    assert (tmp_path / "code").read_text() == "0\n", command.stderr
    assert (command.stdout.count("\n"), command.stderr) == ("head" in line, "")
    assert result_of(tmp_path / "run")["status"] == "completed"
    assert "step 30/30" in (tmp_path / "run/ranks/0.log").read_text()


def test_under_torchrun_too(tmp_path: Path):
    command = in_shell('{ "$@"; echo $? > code; } | head -1', *TORCHRUN, *TINY, "hydra.run.dir=run", folder=tmp_path)
    command.wait()
    assert (tmp_path / "code").read_text() == "0\n", command.stderr
    assert "Traceback" not in command.stderr
    assert result_of(tmp_path / "run")["status"] == "completed"


TEXT_RUN = (
    *(each for each in TINY if not each.startswith(("data", "model"))),
    *("data=text", "data.path=text.txt", "data.seq_len=16", "model=gpt_tiny", "model.num_layers=1"),
    *("model.hidden_size=16", "model.num_heads=2"),
)
COMMANDS: dict[str, tuple[str | None, tuple[str, ...], int]] = {
    "launch.py --help": (None, ("--help",), 0),
    "launch.py --cfg job": (None, ("--cfg", "job"), 0),
    "launch.py": (None, (*TEXT_RUN, "hydra.run.dir=another"), 0),
    "launch.py -m": (None, ("-m", *TEXT_RUN, "seed=1,2", "hydra.sweep.dir=sweep"), 0),
    "evaluate": ("zerotrain", ("evaluate", "run"), 0),
    "evaluate on ranks": ("zerotrain", ("evaluate", "run", "launch.nproc_per_node=2"), 0),
    "evaluate --help": ("zerotrain", ("evaluate", "--help"), 0),
    "export": ("zerotrain", ("export", "run", "--out", "exported"), 0),
    "prepare": ("zerotrain", ("prepare", "data.path=text.txt", "--out", "tokens"), 0),
    "inspect": ("zerotrain", ("inspect", "run"), -13),
    "inspect --diff": ("zerotrain", ("inspect", "--diff", *2 * ("run/checkpoints/step-00000003",)), -13),
    "generate": ("zerotrain", ("generate", "run", "--prompt", "a", "--max-tokens", "5"), -13),
}
"""{name: (module, arguments, exit code when nobody reads)}"""


@pytest.fixture(scope="module")
def text_run(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a text and a run on it."""
    folder = tmp_path_factory.mktemp("text_run")
    (folder / "text.txt").write_text("def main(): return 1\n" * 200)
    ending = zygote.run([*TEXT_RUN, "hydra.run.dir=run"], folder, {})
    assert ending.code == 0, ending.err
    return folder


@pytest.mark.parametrize("name", COMMANDS)
def test_output_that_fails_is_no_traceback_of_any_command(name: str, text_run: Path, zygote: Zygote, tmp_path: Path):
    module, arguments, code = COMMANDS[name]
    shutil.copytree(text_run, tmp_path, dirs_exist_ok=True)
    full = zygote.run([*arguments], tmp_path, {}, module=module, stdout="/dev/full")
    said = "standard output cannot be written: No space left on device\n"
    assert (full.code, full.err) == (1, said)
    for path in tmp_path.iterdir():
        if path.name in ("another", "sweep", "exported", "tokens"):
            shutil.rmtree(path)
    unread = zygote.run([*arguments], tmp_path, {}, module=module, stdout=CLOSED_PIPE)
    assert (unread.code, unread.err) == (code, "")
    for path in tmp_path.rglob("result.json"):
        assert result_of(path.parent)["status"] == "completed"


def test_nor_of_a_whole_process_that_python_itself_ends(tmp_path: Path):
    command = in_shell('"$@" > /dev/full', *HAND, "--help", folder=tmp_path)
    assert command.wait() == 1
    assert command.stderr == "standard output cannot be written: No space left on device\n"
