"""What README and the guides to own code show is run as it stands there, so that it cannot drift from the code.

Every command of a `bash` block runs in a copy of the repository's own files. The `python` and `yaml` blocks, whose
first lines name a file, lie there as that file. A command of launch.py gets overrides at its end that make it small.
"""

import json
import re
import shlex
import shutil
import subprocess
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import hydra
import pytest
from commands import SHOWN_BY_HAND, SHOWN_SWEEP
from omegaconf import OmegaConf

from tests.contract.test_docs import blocks_of, files_of
from tests.ranks.processes import HANG_S
from tests.zygote.client import Zygote
from zerotrain.config.compose import register_schema

REPOSITORY = Path(__file__).resolve().parents[2]
COPIED = ("launch.py", "Makefile", "setup.py", "pyproject.toml", "constraints.txt", "conf", "docs")
STARTERS = {"python": [], "torchrun": ["-m", "torch.distributed.run"], "zerotrain": ["-m", "zerotrain"]}
CHEAP = (
    "launch.threads_per_rank=1",
    "data.seq_len=16",
    "model.num_layers=1",
    "model.hidden_size=32",
    "train.max_steps=2",
    "train.micro_batch_size=2",
    "train.eval_batches=1",
    "train.sample_tokens=4",
)
"""A run of a second, apart from starting Python."""


@dataclass(frozen=True)
class Document:
    """One markdown file of the repository."""

    name: str

    @cached_property
    def text(self) -> str:
        return (REPOSITORY / self.name).read_text()

    def blocks(self, *languages: str) -> list[str]:
        """The code blocks of these languages, in order."""
        return blocks_of(REPOSITORY / self.name, *languages)

    @cached_property
    def commands(self) -> list[str]:
        """The lines of the bash blocks without comments, continued lines joined."""
        lines = "".join(self.blocks("bash")).replace("\\\n", " ").splitlines()
        commands = [shlex.join(shlex.split(line, comments=True)) for line in lines]
        return [command for command in commands if command]

    @cached_property
    def files(self) -> dict[str, str]:
        """What the reader is told to write: path -> text of each block that begins with `# path`."""
        return files_of(REPOSITORY / self.name)


README = Document("README.md")
GUIDES = ("own_model", "own_data", "own_optimizer", "own_loop", "ema")
DOCUMENTS = [README, *(Document(f"docs/guides/{name}.md") for name in GUIDES)]
ELSEWHERE = {SHOWN_BY_HAND, SHOWN_SWEEP}
"""Run by tests/distributed/test_launching.py, which looks at all that they leave."""
COMMANDS = [(document, each) for document in DOCUMENTS for each in document.commands if each not in ELSEWHERE]

each_document = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.name)


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what a user has after a clone, and with the files that the documents tell to write."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in COPIED:
        source = REPOSITORY / name
        (shutil.copytree if source.is_dir() else shutil.copy)(source, folder / name)
    for document in DOCUMENTS:
        for name, text in document.files.items():
            (folder / name).write_text(text)
    return folder


def run(arguments: list[str], folder: Path, zygote: Zygote) -> str:
    """Run `python ARGUMENTS` in `folder` on the CPU; what it printed."""
    environment = {"PYTHONPATH": str(REPOSITORY), "XDG_CACHE_HOME": str(folder / "cache")}
    ending = zygote.run_python(arguments, folder, environment)
    assert ending.code == 0, ending.out + ending.err
    return ending.out


def recipe(target: str, folder: Path) -> list[str]:
    """The commands that make would run for a target."""
    # Without what the make that may run these tests hands down: it would add lines of its own.
    make = ["env", "-u", "MAKEFLAGS", "-u", "MAKELEVEL", "make", "-n", target]
    done = subprocess.run(make, cwd=folder, capture_output=True, text=True, timeout=HANG_S, check=True)
    return done.stdout.replace("\\\n", " ").splitlines()


def launches(command: str, folder: Path) -> list[list[str]]:
    """The arguments of each Python program that a shown command starts, made small where it is launch.py."""
    words = shlex.split(command)
    if words[0] == "make":
        lines = [line for line in recipe(words[1], folder) if "launch.py" in line]
        return [arguments for line in lines for arguments in launches(line, folder)]
    starter = STARTERS[Path(words[0]).name]
    if "launch.py" not in words:
        return [[*starter, *words[1:]]]
    return [[*starter, *(thinned(words[1:]) if is_sweep(words) else words[1:]), *CHEAP]]


def is_sweep(arguments: list[str]) -> bool:
    return "launch.py" in arguments and "-m" in arguments[arguments.index("launch.py") :]


def thinned(arguments: list[str]) -> list[str]:
    """The same sweep over the last value of each setting: one job, of one rank."""
    return [*(re.sub(r"=.*,", "=", argument) for argument in arguments), "launch.nproc_per_node=1"]


@pytest.mark.parametrize(("document", "command"), COMMANDS, ids=[f"{document.name}: {c}" for document, c in COMMANDS])
def test_a_command_that_is_shown_runs(document: Document, command: str, checkout: Path, zygote: Zygote):
    for arguments in launches(command, checkout):
        output = run(arguments, checkout, zygote)
        if is_sweep(arguments):
            assert "weights: sha256 " in output


def test_the_commands_that_are_run_elsewhere_are_shown():
    assert SHOWN_BY_HAND in README.commands
    assert f"\n{SHOWN_SWEEP} " in Document("docs/guides/sweeps.md").text


@each_document
def test_every_file_that_is_shown_is_used_by_a_command(document: Document):
    assert len(document.files) == len(document.blocks("python", "yaml")) > 0
    used = set(re.findall(r"\w+", " ".join(document.commands)))
    assert {Path(name).stem for name in document.files} <= used


def test_every_make_target_that_is_named_exists(checkout: Path):
    named = set(re.findall(r"(?:^|`)make ([a-z-]+)", README.text, re.MULTILINE))
    assert {"train", "test"} <= named
    assert all(recipe(target, checkout) for target in named)


def test_every_setting_in_the_table_has_the_default_it_shows():
    shown = dict(re.findall(r"^\| `([a-z_.]+)` \| `([^`]+)` \|", README.text, re.MULTILINE))
    assert len(shown) > 10
    register_schema()
    with hydra.initialize_config_dir(config_dir=str(REPOSITORY / "conf"), version_base="1.3"):
        composed = hydra.compose("train", return_hydra_config=True)
    choices = composed.hydra.runtime.choices
    defaults = {name: choices[name] if name in choices else OmegaConf.select(composed, name) for name in shown}
    assert {name: value if isinstance(value, str) else json.dumps(value) for name, value in defaults.items()} == shown


@pytest.mark.parametrize("name", ["README.md", "docs/reference/rooms.md"])
def test_a_tree_names_what_is_there_and_every_room_of_the_package(name: str):
    [tree] = [block for block in Document(name).blocks("text") if "zerotrain/\n" in block]
    top = set(re.findall(r"^([\w.]+/?)", tree, re.MULTILINE))
    assert [name for name in top if not (REPOSITORY / name).exists()] == []
    rooms = set(re.findall(r"\b(\w+)/", tree)) - {name.rstrip("/") for name in top}
    assert {path.parent.name for path in (REPOSITORY / "zerotrain").glob("*/__init__.py")} <= rooms


def test_the_table_of_promises_is_short():
    table = README.text.partition("| promise | proof |")[2].partition("\n\n")[0].splitlines()[2:]
    cells = [re.sub(r"\]\([^)]*\)|[*`\[]", "", cell) for row in table for cell in row.strip("| ").split(" | ")]
    assert len(cells) == 10
    assert [cell for cell in cells if len(cell.split()) > 12] == []


# ---- the commands of guides/coming_from.md, in a column of its table

COMING_FROM = Document("docs/guides/coming_from.md")
COLUMN = re.findall(r"^\| [^|]+ \| `([^`]+)`", COMING_FROM.text, re.MULTILINE)
OF_A_RUN = [line for line in COLUMN if "RUN" in line]
OF_TRANSFORMERS = [line for line in COLUMN if "path/to/model" in line]
SMALL = tuple(setting for setting in CHEAP if not setting.startswith("model."))


def pretrained(folder: Path) -> None:
    """A tiny GPT-2 with a tokenizer of words."""
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"?": 0, "the": 1}, unk_token="?"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, eos_token="?").save_pretrained(folder)
    config = transformers.GPT2Config(n_embd=16, n_layer=1, n_head=2, n_positions=32, vocab_size=8)
    transformers.GPT2LMHeadModel(config).save_pretrained(folder)


def test_the_column_has_a_command_in_every_row():
    rows = [line for line in COMING_FROM.text.splitlines() if line.startswith("| ")][1:]
    assert len(COLUMN) == len(rows) > 14


@pytest.mark.slow
@pytest.mark.parametrize("line", [line for line in COLUMN if line not in OF_A_RUN])
@pytest.mark.thinned(2)
def test_a_line_of_coming_from_runs(line: str, checkout: Path, zygote: Zygote):
    small = SMALL if line in OF_TRANSFORMERS or "model=own" in line else CHEAP
    if line in OF_TRANSFORMERS and not (checkout / "path/to/model").exists():
        pretrained(checkout / "path/to/model")
    if "wandb" in line:
        pytest.importorskip("wandb")
    path = () if "data.path" in line else ("data.path=docs",)
    arguments = ["launch.py", *shlex.split(line), *path, *small]
    run(thinned(arguments) if is_sweep(arguments) else arguments, checkout, zygote)


def test_a_run_is_evaluated_generates_and_is_exported_as_coming_from_shows(checkout: Path, zygote: Zygote):
    run(["launch.py", "hydra.run.dir=outputs/small", "data.path=docs", *CHEAP], checkout, zygote)
    for line in OF_A_RUN:
        for arguments in launches(line.replace("RUN", "outputs/small"), checkout):
            run(arguments, checkout, zygote)
    assert list((checkout / "DIR").iterdir())
