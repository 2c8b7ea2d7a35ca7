"""`zerotrain VERB`: one command with one frame."""

import errno
import os
import re
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

import hydra
import pytest

from tests.zygote.client import Zygote
from zerotrain import __version__
from zerotrain.__main__ import VERBS, main
from zerotrain.checkpoint.manifest import versions
from zerotrain.commands.frame import exit_code
from zerotrain.config.compose import register_schema
from zerotrain.errors import ConfigError

PACKAGE = Path(__file__).resolve().parents[3] / "zerotrain"


PLANS = "; zerotrain plan.only=true plans a run"


@pytest.mark.parametrize(("given", "hint"), [("trian", "; did you mean train?"), ("bogus", ""), ("plan", PLANS)])
def test_a_verb_that_there_is_not_is_one_line(given: str, hint: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([given, "zero.stage=3"])
    assert ended.value.code == 2
    assert capsys.readouterr().err == f"{given}: there is no such verb{hint}; there are {', '.join(VERBS)}\n"


def test_training_is_the_verb_that_may_be_left_out(zygote: Zygote, tmp_path: Path) -> None:
    wrong = zygote.run(["train", "zero.stage=9"], tmp_path, module="zerotrain")
    assert wrong == zygote.run(["zero.stage=9"], tmp_path, module="zerotrain")
    assert (wrong.code, wrong.out, wrong.err.count("\n")) == (2, "", 1)


@pytest.mark.parametrize("verb", VERBS)
def test_a_folder_that_is_gone_is_one_line_of_each_verb(verb, tmp_path, monkeypatch, capsys) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(SystemExit) as ended:
        main([verb, "x"])
    assert ended.value.code == 2
    assert capsys.readouterr().err == "the working directory no longer exists; change to one that does\n"


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (IsADirectoryError(errno.EISDIR, "Is a directory", "a\nb"), 2, "a\\nb: Is a directory"),
        (PermissionError(errno.EACCES, "Permission denied"), 2, "[Errno 13] Permission denied"),
        (OSError(errno.ENOSPC, "No space left on device", "disk"), 1, "disk: No space left on device"),
        (ConfigError("--out: is wrong"), 2, "--out: is wrong"),
    ],
)
def test_what_the_disk_refuses_is_one_line_and_the_users_to_mend_unless_it_is_full(error, code, said, capsys) -> None:
    def work() -> None:
        raise error

    assert exit_code(work) == code
    assert capsys.readouterr().err == f"{said}\n"


EXTRAS = (
    "datasets", "deepspeed", "huggingface_hub", "matplotlib", "mlflow", "optuna", "peft", "psutil", "pyarrow",
    "safetensors", "sqlalchemy", "tensorboard", "tokenizers", "torchmetrics", "trackio", "transformers", "wandb",
    "zstandard",
)  # fmt: skip
"""Packages that `make train` does not install."""


def test_each_verb_is_there_with_the_packages_that_training_needs_alone() -> None:
    modules = [*(module for module, _ in VERBS.values()), "zerotrain.launching.task"]
    program = f"""
import importlib, sys
sys.modules.update(dict.fromkeys({EXTRAS!r}))  # to import one of these fails, as if it were absent
for each in {modules!r}:
    importlib.import_module(each)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("verb", ["train", "generate", "export", "alive", "slurm", "prepare", "tokenizer"])
def test_a_verb_reads_its_arguments_without_torch(verb: str) -> None:
    """A probe of a cluster asks `alive` every few seconds; torch takes some to import, and a wrong option waits."""
    program = f"import sys, {VERBS[verb][0]}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("False\n", "")


def read(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """What the program that an installation has prints, in a shell of its own."""
    program = "import sys; from zerotrain.__main__ import command; sys.argv[0] = '/bin/zerotrain'; command()"
    return subprocess.run(
        [sys.executable, "-c", program, *words], env=os.environ | environment, capture_output=True, text=True
    )


@pytest.mark.parametrize("words", [["--help"], ["-h"], ["help"], []])
def test_help_has_a_line_for_each_verb_and_two_examples(words: list[str]) -> None:
    done = read(*words)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines if line.startswith("  ") and "zerotrain" not in line] == list(VERBS)
    assert sum(line.startswith("  zerotrain ") for line in lines) == 2
    assert max(map(len, lines)) <= 120
    if words:  # with none, a rank of torchrun trains
        assert read(*words, RANK="1", WORLD_SIZE="2").stdout == ""


def test_the_version_is_one_and_stands_in_one_place() -> None:
    assert read("--version").stdout.startswith(f"zerotrain {__version__}, torch {version('torch')}, Python 3.")
    assert versions()["zerotrain"] == __version__
    named = [path for path in PACKAGE.rglob("*.py") if f'"{__version__}"' in path.read_text()]
    assert named == [PACKAGE / "version.py"]
    project = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())
    assert (project["project"]["dynamic"], "version" in project["project"]) == (["version"], False)
    assert f"## [{__version__}]" in (PACKAGE.parent / "CHANGELOG.md").read_text()


def test_the_help_of_train_has_each_group_of_settings_and_of_choices_with_a_page_that_is_there() -> None:
    text = read("train", "--help").stdout
    register_schema()
    with hydra.initialize_config_dir(config_dir=str(PACKAGE.parent / "conf"), version_base="1.3"):
        groups = {str(name) for name in hydra.compose("train")}
    pages = dict(re.findall(r"^  (\w+)  .* (docs/\S+\.md)$", text, re.MULTILINE))
    assert pages.keys() == groups
    assert [page for page in re.findall(r"docs/[\w/]+\.md", text) if not (PACKAGE.parent / page).is_file()] == []
    assert "\noptimizer: adamw, muon, sgd\n" in text
    assert len(text.splitlines()) < 50


@pytest.mark.parametrize(
    ("line", "completed"),
    [
        ("zerotrain gene", "generate"),
        ("zerotrain generate outp", ""),
        ("zerotrain zero.st", "zero.stage="),
        ("zerotrain train precision=bf", "precision=bf16"),
        ("zerotrain --config-dir mine", ""),
    ],
)
def test_bash_completes_verbs_and_settings_and_leaves_paths_to_itself(line: str, completed: str, tmp_path) -> None:
    """By the function that `zerotrain -sc install=bash` prints, in a bash."""
    installed = read("-sc", "install=bash").stdout
    assert installed.splitlines()[-1].endswith("-F hydra_bash_completion zerotrain")
    (tmp_path / "zerotrain").write_text(
        f"#!{sys.executable}\nimport sys; sys.path.insert(0, {str(PACKAGE.parent)!r})\n"
        "from zerotrain.__main__ import command; command()\n"
    )
    (tmp_path / "zerotrain").chmod(0o755)
    script = f"{installed}\nCOMP_LINE='{line}'; COMP_POINT={len(line)}; COMP_CWORD={len(line.split()) - 1}\n"
    script += "hydra_bash_completion; echo ${COMPREPLY[@]}"
    done = subprocess.run(
        ["bash", "-c", script],
        env=os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.stdout.strip() == completed, done.stderr


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (
            "generate RUN --max-new-tokens 8",
            "--max-new-tokens: there is no such option; zerotrain calls it --max-tokens",
        ),
        ("generate --model=x", "--model: there is no such option; zerotrain calls it RUN, a path without an option"),
        ("export RUN --output-dir x", "--output-dir: there is no such option; zerotrain calls it --out"),
        ("alive RUN --withn 3", "--withn: there is no such option; did you mean --within?"),
        (
            "evaluate RUN --batch-size 4",
            "--batch-size: there is no such option; zerotrain calls it train.micro_batch_size, a setting without "
            "dashes",
        ),
        (
            "evaluate RUN --train.eval_batches=4",
            "--train.eval_batches: there is no such option; write train.eval_batches=VALUE, a setting without dashes",
        ),
        ("generate RUN --\x1b[2J", "--\\x1b[2J: there is no such option"),
        ("generate --prompt x", "the following arguments are required: RUN"),
    ],
)
def test_an_option_that_a_verb_has_not_is_answered_with_ours(words: str, answer: str, monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "argv", ["/bin/zerotrain"])
    verb = words.split()[0]
    with pytest.raises(SystemExit) as ended:
        main(words.split())
    assert ended.value.code == 2
    assert capsys.readouterr().err == f"zerotrain {verb}: {answer}\nzerotrain {verb} --help lists the options\n"


@pytest.mark.parametrize(
    ("words", "answers"),
    [
        ("--zero.stage=3", ["--zero.stage=3: there is no such option; write zero.stage=3 without dashes"]),
        (
            "zero.stage=3 --lr 4 --nproc_per_node=2 --bf16 -m",
            [
                "--lr: there is no such option; zerotrain calls it optimizer.lr without dashes",
                "--nproc_per_node=2: there is no such option; zerotrain calls it launch.nproc_per_node without dashes",
                "--bf16: there is no such option; zerotrain calls it precision=bf16 without dashes",
            ],
        ),
        ("train -x", ["-x: there is no such option; write settings, such as zero.stage=3, without dashes"]),
    ],
)
def test_a_setting_with_dashes_is_answered_with_how_it_is_written(words: str, answers: list[str]) -> None:
    done = read(*words.split())
    assert (done.returncode, done.stdout, done.stderr.splitlines()) == (2, "", answers)
