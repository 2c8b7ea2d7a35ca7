"""The pages of docs/: short, linked, with commands that the code knows, and as new as the data they are made of.

`test_readme.py` runs what README and some guides show. Here every command of every page is composed or parsed.
"""

import ast
import functools
import importlib.util
import itertools
import re
import shlex
from pathlib import Path
from types import ModuleType

import hydra
import pytest
import yaml

from zerotrain.__main__ import VERBS
from zerotrain.config.checks import value_problems
from zerotrain.config.compose import register_schema, to_config

REPOSITORY = Path(__file__).resolve().parents[2]
FRAME = REPOSITORY / "zerotrain/commands/frame.py"
"""Declares the flags that several commands have."""
DOCS = REPOSITORY / "docs"
PAGES = [REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
NUM_LINES = 150
STARTERS = ("python", "torchrun", "make")
WITH_VALUE = ("--config-dir", "--cfg")
"""Options of a training command that are followed by a value."""

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))


def blocks_of(page: Path, *languages: str) -> list[str]:
    """The code blocks of these languages, in order."""
    return re.findall(rf"^```(?:{'|'.join(languages)})\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)


def commands_of(page: Path) -> list[list[str]]:
    """The words of each line in a block that is a command."""
    lines = "\n".join(blocks_of(page, "bash", "sh", "text")).splitlines()
    return [
        shlex.split(line, comments=True) for line in lines if line.startswith(tuple(f"{each} " for each in STARTERS))
    ]


def files_of(page: Path) -> dict[str, str]:
    """The files that a page tells to write: path -> text of each block that begins with `# path`."""
    named = ((re.match(r"# ([\w/]+\.(?:py|yaml))\n", block), block) for block in blocks_of(page, "python", "yaml"))
    return {name[1]: block for name, block in named if name}


@functools.cache
def text_without_code(page: Path) -> str:
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def links_of(page: Path) -> list[tuple[Path, str]]:
    """(file, anchor) of each link and picture of a page within the repository."""
    targets = re.findall(r"\]\(([^)\s]+)\)", text_without_code(page))
    parts = [target.partition("#") for target in targets if "://" not in target]
    return [((page.parent / name).resolve() if name else page, anchor) for name, _, anchor in parts]


def anchors_of(page: Path) -> set[str]:
    """The anchors that GitHub gives the headings of a page."""
    heads = re.findall(r"^#+ (.*)$", text_without_code(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@each_page
def test_a_page_is_short_and_opens_with_its_question(page: Path):
    lines = page.read_text().splitlines()
    assert len(lines) <= NUM_LINES
    assert lines[0].startswith("# ")
    assert page.parent == REPOSITORY or lines[0].endswith("?")
    assert sum(line.startswith("# ") for line in text_without_code(page).splitlines()) == 1


@pytest.mark.parametrize(
    "page", [*PAGES, REPOSITORY / "CHANGELOG.md"], ids=lambda page: str(page.relative_to(REPOSITORY))
)
def test_every_link_leads_somewhere(page: Path):
    links = links_of(page)
    assert [str(path) for path, _ in links if not path.exists()] == []
    assert [anchor for path, anchor in links if anchor and anchor not in anchors_of(path)] == []


def test_every_page_and_picture_is_reached_from_readme():
    everything = {*PAGES, *(DOCS / "images").iterdir()}
    reached, waiting = set(), [PAGES[0]]
    while waiting:
        page = waiting.pop()
        if page not in reached:
            reached.add(page)
            waiting += [path for path, _ in links_of(page) if path in everything] if page.suffix == ".md" else []
    assert {str(path) for path in everything - reached} == set()


# ---- commands


class Shown:
    """The folder of yamls that a page tells to write, and those that it leaves to the reader."""

    def __init__(self, page: Path, folder: Path) -> None:
        self.folder = folder
        self._composed: list[list[str]] = []
        for name, text in {"my_conf/experiment/mine.yaml": "# @package _global_\n", **files_of(page)}.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)

    def check(self, words: list[str]) -> None:
        """Compose or parse a command; raises what is wrong with it."""
        if words[0] == "make":
            assert re.search(rf"^{words[1]}:", (REPOSITORY / "Makefile").read_text(), re.MULTILINE)
        elif "launch.py" in words:
            self.compose(words[words.index("launch.py") + 1 :])
        elif words[0] == "zerotrain":
            self.check_module("zerotrain", words[1:])
        elif "-m" in words:
            module, *arguments = words[words.index("-m") + 1 :]
            self.check_module(module, arguments)
        else:
            [script] = [word for word in words if word.endswith(".py")]
            assert (REPOSITORY / script).exists() or (self.folder / script).exists()

    def check_module(self, module: str, arguments: list[str]) -> None:
        """Look for the flags of a module's command where they are declared, and compose its settings; for the files of
        one that runs tests."""
        if module == "pytest":
            named = [each.partition("::")[0] for each in arguments if each.startswith("tests/")]
            return self.require_files(named)
        if module == "zerotrain" and (not arguments or arguments[0] not in VERBS or arguments[0] == "train"):
            return self.compose(arguments)
        if module == "zerotrain" and arguments[0] == "slurm":  # before -- are options of sbatch
            return self.compose(arguments[arguments.index("--") + 1 :])
        module = VERBS[arguments[0]][0] if module == "zerotrain" else module
        found = REPOSITORY / module.replace(".", "/")
        sources = [*found.glob("*.py")] if found.is_dir() else [found.with_suffix(".py"), FRAME]
        text = "".join(path.read_text() for path in sources)
        assert [flag for flag in arguments if flag.startswith("--") and f'"{flag.split("=")[0]}"' not in text] == []
        if module.startswith("zerotrain"):
            self.compose([each for each in arguments if re.match(r"[a-z_.]+=", each)])
        return None

    def require_files(self, names: list[str]) -> None:
        assert [name for name in names if not (REPOSITORY / name).exists()] == []

    def compose(self, arguments: list[str]) -> None:
        """Compose a training command, of a sweep the job of the last values."""
        is_sweep = "-m" in arguments
        values = [after for before, after in itertools.pairwise(arguments) if before in WITH_VALUE]
        overrides = [each for each in arguments if not each.startswith("-") and each not in values]
        if is_sweep:
            overrides = [re.sub(r"=(?:tag\(log,)?interval\((.*?)\)+$", r"=\1", each) for each in overrides]
            overrides = [re.sub(r"=[^{\[]*,", "=", each) for each in overrides]
        folders = [f"file://{self.folder / name}" for name in ("conf", "my_conf") if (self.folder / name).exists()]
        register_schema()
        overrides.append(f"hydra.searchpath=[{','.join(folders)}]")
        if overrides not in self._composed:
            with hydra.initialize_config_dir(config_dir=str(REPOSITORY / "conf"), version_base="1.3"):
                config, problems = to_config(hydra.compose("train", overrides))
            assert problems + value_problems(config) == []
            self._composed.append(overrides)


@each_page
def test_the_code_knows_every_command_that_is_shown(page: Path, tmp_path: Path):
    shown = Shown(page, tmp_path)
    for words in commands_of(page):
        try:
            shown.check(words)
        except Exception as error:
            raise AssertionError(f"{shlex.join(words)}: {error}") from error


def test_a_command_that_the_code_does_not_know_is_found(tmp_path: Path):
    shown = Shown(PAGES[0], tmp_path)
    for command in (
        "python launch.py zero.stage=4",
        "zerotrain export RUN --ou DIR",
        "zerotrain evaluate RUN zero.stge=3",
    ):
        with pytest.raises(Exception):  # noqa: B017, PT011 each has another
            shown.check(shlex.split(command))


@each_page
def test_every_block_of_python_and_yaml_can_be_read(page: Path):
    for block in blocks_of(page, "python"):
        ast.parse(block)
    for block in blocks_of(page, "yaml"):
        assert isinstance(yaml.safe_load(block), dict)


def test_the_store_that_a_page_writes_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    [block] = blocks_of(DOCS / "guides/tokens.md", "python")
    monkeypatch.chdir(tmp_path)
    exec(compile(block, "tokens.md", "exec"), {})
    assert (tmp_path / "my_store/index.json").exists()


# ---- pages and pictures made of data


def script(name: str) -> ModuleType:
    """A script of docs/, imported."""
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_of_endings_is_that_of_their_table():
    endings = script("endings")
    assert endings.PAGE.read_text() == endings.page(), "run: python docs/endings.py"
    assert len(endings.ENDINGS) == 12


def test_the_pages_of_settings_and_choices_are_those_of_the_code():
    for path, text in script("settings").pages().items():
        assert path.read_text() == text, "run: python docs/settings.py"


def test_the_pages_of_messages_are_those_of_the_code():
    messages = script("messages")
    written = messages.pages()
    assert {str(path) for path in messages.PAGES.iterdir()} == {str(path) for path in written if path != messages.INDEX}
    assert [str(path) for path, text in written.items() if path.read_text() != text] == [], (
        "run: python docs/messages.py"
    )
