"""Nothing of a folder runs that somebody else has made, whichever command reads it; each says so in one line."""

import io
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import lures
import pytest
import torch
from commands import REPOSITORY, TINY

from tests.zygote.client import Ending, Zygote
from zerotrain.checkpoint.manifest import MANIFEST, read_manifest
from zerotrain.commands.export import main as export
from zerotrain.config.schema import Config
from zerotrain.launching.spawn import _REMOVE_BEHIND_US
from zerotrain.run import factory
from zerotrain.saved.saved import ABOUT

PYTHON = "open({canary!r}, 'w').close()\n"
SHORT = ("--prompt", "a", "--max-tokens", "1")
OFFLINE = {"HF_HUB_OFFLINE": "1", "SECRET": lures.SECRET}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that anybody may read."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "text.txt").write_text("def main(): return 1\n" * 60)
    data = {"_target_": "zerotrain.data.TextDataset", "path": str(folder / "text.txt"), "seq_len": 16}
    config = Config(
        model=lures.gpt(),
        data=data,
        optimizer={"_target_": "torch.optim.SGD", "_partial_": True, "lr": 0.1},
        scheduler={"_target_": "zerotrain.training.constant", "_partial_": True},
    )
    config.train.max_steps = config.train.eval_batches = config.train.sample_tokens = 1
    factory.run(factory.RunSpec(config, folder, []))
    return folder


class Trial:
    """A folder with a lure in it, and commands that are given it."""

    def __init__(self, folder: Path, zygote: Zygote) -> None:
        self.folder, self._zygote, self.lure = folder, zygote, folder / "lure"
        self.canary = folder / "canary"
        self.lure.mkdir(exist_ok=True)
        (folder / "installed").mkdir()
        (folder / "installed" / "canary_on_import.py").write_text(PYTHON.format(canary=str(self.canary)))

    def filled(self, value: Any) -> Any:
        """Without words that stand for something else."""
        if isinstance(value, str):
            return value.replace("CANARY", str(self.canary)).replace("FOLDER", str(self.lure))
        if isinstance(value, dict):
            return {name: self.filled(each) for name, each in value.items()}
        return [self.filled(each) for each in value] if isinstance(value, list) else value

    def lay(self, lure: lures.Lure) -> None:
        """Write its files."""
        for name, content in lure.files.items():
            path = self.lure / name
            path.parent.mkdir(exist_ok=True, parents=True)
            if content in (lures.PICKLE, lures.ZIPPED, lures.OBJECTS):
                path.write_bytes(self._bytes(content))
            elif isinstance(content, bytes):
                path.write_bytes(content)
            else:
                path.write_text(self.filled(content if isinstance(content, str) else json.dumps(content)))

    def _bytes(self, content: bytes) -> bytes:
        if content == lures.PICKLE:
            return lures.pickled(str(self.canary))
        if content == lures.OBJECTS:
            header = b"{'descr': '|O', 'fortran_order': False, 'shape': (1,), }".ljust(117) + b"\n"
            return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + lures.pickled(str(self.canary))
        packed = io.BytesIO()
        torch.save({"weight": torch.zeros(2)}, packed)
        made = io.BytesIO()
        with zipfile.ZipFile(packed) as old, zipfile.ZipFile(made, "w") as new:
            for each in old.namelist():
                is_pickle = each.endswith("data.pkl")
                new.writestr(each, lures.pickled(str(self.canary)) if is_pickle else old.read(each))
        return made.getvalue()

    def config(self, values: dict[str, Any], lure: lures.Lure) -> None:
        """Change the config of a run."""
        if lure.model is not None:
            values["model"] = self.filled(lure.model)
        for dotted, value in lure.changed.items():
            *groups, name = dotted.split(".")
            place = values
            for group in groups:
                place = place[group]
            place[name] = self.filled(value)

    def command(self, module: str | None, *arguments: object) -> Ending:
        """What came of a command in whose folder nothing has run."""
        environment = OFFLINE | {"PYTHONPATH": f"{self.folder / 'installed'}{os.pathsep}{REPOSITORY}"}
        ending = self._zygote.run(
            list(map(str, arguments)), self.folder, environment, module=module, tells_programs=True
        )
        said = f"{module} {arguments}: exit code {ending.code}\n{ending.out[-3000:]}\n{ending.err[-3000:]}"
        assert not self.canary.exists(), said
        assert "Traceback" not in said, said
        programs = [line for line in ending.err.splitlines() if line.startswith("started: ")]
        # An evaluation that may run starts its ranks, and one program: it removes their folder behind them.
        assert [line for line in programs if _REMOVE_BEHIND_US not in line] == [], said
        assert lures.SECRET not in ending.out + ending.err, said
        return ending

    def require(self, ending: Ending, code: int, said: str) -> None:
        """One line, if it is refused."""
        shown = f"exit code {ending.code} for {code}\n{ending.out[-3000:]}\n{ending.err[-3000:]}"
        assert ending.code == code, shown
        if code == 2:
            lines = [line for line in ending.err.splitlines() if not line.startswith("warning: ")]
            assert len(lines) == 1, shown
            assert said in lines[0], shown
            assert lines[0].isprintable(), shown
            assert len(lines[0]) <= 2100, shown


@pytest.fixture
def trial(tmp_path: Path, zygote: Zygote) -> Trial:
    return Trial(tmp_path, zygote)


@pytest.mark.parametrize("lure", lures.RUNS, ids=str)
@pytest.mark.thinned(2)
def test_a_checkpoint_runs_nothing(lure: lures.Lure, run: Path, trial: Trial) -> None:
    shutil.copytree(run, trial.lure, dirs_exist_ok=True)
    trial.lay(lure)
    [folder] = (trial.lure / "checkpoints").iterdir()
    manifest = read_manifest(folder)
    trial.config(manifest.content["config"], lure)
    (folder / MANIFEST).write_text(manifest.text())
    commands = {
        "generate": (trial.lure / "checkpoints", *SHORT),
        "evaluate": (trial.lure / "checkpoints",),
        "export": (trial.lure / "checkpoints", "--out", trial.folder / "out"),
        "inspect": (folder,),
    }
    for name, arguments in commands.items():
        ending = trial.command("zerotrain", name, *arguments)
        trial.require(ending, (lures.CODES | lure.codes)[name], lure.says.get(name, lure.said))


@pytest.mark.parametrize("lure", [lure for lure in lures.RUNS if lure.name in lures.EXPORTS], ids=str)
def test_an_exported_folder_runs_nothing(lure: lures.Lure, run: Path, trial: Trial) -> None:
    trial.lure.rmdir()
    assert export([str(run), "--out", str(trial.lure)]) == 0
    trial.lay(lure)
    about = json.loads((trial.lure / ABOUT).read_text())
    trial.config(about["config"], lure)
    (trial.lure / ABOUT).write_text(json.dumps(about))
    for name, arguments in (("generate", SHORT), ("evaluate", ())):
        trial.require(
            trial.command("zerotrain", name, trial.lure, *arguments), (lures.CODES | lure.codes)[name], lure.said
        )


@pytest.mark.parametrize("lure", [*lures.MODELS, *lures.ADAPTERS], ids=str)
def test_a_model_of_hugging_face_runs_nothing(lure: lures.Lure, trial: Trial) -> None:
    pytest.importorskip("peft")
    trial.lay(lure)
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "model": {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": []},
    }
    (trial.lure / "tokenizer.json").write_text(json.dumps(tokenizer))
    (trial.lure / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    trial.require(trial.command("zerotrain", "generate", trial.lure, *SHORT), 2, lure.said)
    if lure in lures.MODELS:
        settings = ("data=synthetic", "model=huggingface", f"model.name_or_path={trial.lure}", "launch.device=cpu")
        trial.require(trial.command(None, *settings, "hydra.run.dir=out"), 2, lure.said)


@pytest.mark.parametrize("lure", lures.TOKENIZERS, ids=str)
def test_a_tokenizer_runs_nothing(lure: lures.Lure, trial: Trial) -> None:
    pytest.importorskip("transformers")
    trial.lay(lure)
    (trial.folder / "text.txt").write_text("def main(): return 1\n" * 60)
    settings = (f"data.path={trial.folder / 'text.txt'}", f"data.tokenizer={trial.lure}", "data.vocab_size=null")
    trial.require(trial.command("zerotrain", "prepare", "data=text", *settings), 2, lure.said)
    launched = trial.command(None, "data=text", *settings, "launch.device=cpu", "hydra.run.dir=out")
    trial.require(launched, 2, lure.said)


@pytest.mark.parametrize(
    ("lure", "settings"), lures.DATA, ids=lambda given: str(given) if isinstance(given, lures.Lure) else ""
)
def test_data_runs_nothing(lure: lures.Lure, settings: tuple[str, ...], trial: Trial) -> None:
    if "data=huggingface" in settings:
        pytest.importorskip("datasets")
    trial.lay(lure)
    named = trial.filled([*settings, "data.vocab_size=256"])
    if "data=text" in settings:
        trial.require(trial.command("zerotrain", "prepare", *named, f"data.cache_dir={trial.folder}"), 2, lure.said)
    launched = trial.command(None, *named, "data.seq_len=16", "launch.device=cpu", "hydra.run.dir=out")
    trial.require(launched, 2, lure.said)


@pytest.mark.parametrize("lure", lures.WEIGHTS, ids=str)
def test_weights_to_start_from_run_nothing(lure: lures.Lure, trial: Trial) -> None:
    trial.lay(lure)
    started = trial.command(None, *TINY, f"checkpoint.init_from={trial.lure / 'w.pt'}", "hydra.run.dir=out")
    trial.require(started, 2, lure.said)


def test_a_run_that_goes_on_builds_what_the_user_has_named(run: Path, trial: Trial) -> None:
    shutil.copytree(run, trial.lure, dirs_exist_ok=True)
    [folder] = (trial.lure / "checkpoints").iterdir()
    manifest = read_manifest(folder)
    for lure in (*lures.RUNS[:3], lures.CALLBACKS):
        trial.config(manifest.content["config"], lure)
    manifest.content["extra"]["trainer"] = {"_target_": "os.system", "command": f"touch {trial.canary}"}
    (folder / MANIFEST).write_text(manifest.text())
    given = [f"+model.{name}={value}" for name, value in lures.gpt().items() if name != "_target_"]
    ending = trial.command(
        None, *TINY, "model._target_=zerotrain.models.GPT", *given, f"checkpoint.resume={trial.lure}"
    )
    assert ending.code in (1, 2)


@pytest.mark.parametrize("name", ["generate", "evaluate", "export", "inspect", "prepare"])
@pytest.mark.thinned(2)
def test_a_folder_in_which_the_user_is_stands_for_no_module(name: str, run: Path, tmp_path: Path) -> None:
    """The command is that of a user who is in the folder, with all that Python does before its first line."""
    folder, canary = tmp_path / "lure", tmp_path / "canary"
    shutil.copytree(run, folder)
    for module in ("torch", "typing", "argparse", "json", "dataclasses", "peft", "model", "tensorflow", "omegaconf"):
        (folder / f"{module}.py").write_text(PYTHON.format(canary=str(canary)))
    arguments = {
        "generate": (".", *SHORT),
        "evaluate": (".",),
        "export": (".", "--out", "../out"),
        "inspect": (".",),
        "prepare": ("data=text", "data.path=text.txt", "data.cache_dir=../cache"),
    }[name]
    python = [sys.executable, "-m", "zerotrain", name]
    environment = {**os.environ, **OFFLINE, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*python, *arguments], cwd=folder, env=environment, capture_output=True, text=True)
    assert not canary.exists(), done.stderr
    assert done.returncode == 0, done.stderr


def test_trusted_code_comes_from_elsewhere_than_the_folder(run: Path, tmp_path: Path) -> None:
    """On several ranks too, whose processes are started in the folder."""
    folder, canary = tmp_path / "lure", tmp_path / "canary"
    shutil.copytree(run, folder)
    (folder / "torch.py").write_text(PYTHON.format(canary=str(canary)))
    (folder / "model.py").write_text(f"from zerotrain.models import GPT as Own\n{PYTHON.format(canary=str(canary))}")
    (tmp_path / "mine.py").write_text("from zerotrain.models import GPT as Own\n")
    [checkpoint] = (folder / "checkpoints").iterdir()
    manifest = read_manifest(checkpoint)
    environment = {**os.environ, **OFFLINE, "PYTHONPATH": f"{tmp_path}{os.pathsep}{REPOSITORY}", "OMP_NUM_THREADS": "1"}
    for module, code in (("model", 2), ("mine", 0)):
        manifest.content["config"]["model"]["_target_"] = f"{module}.Own"
        (checkpoint / MANIFEST).write_text(manifest.text())
        command = [sys.executable, "-m", "zerotrain", "evaluate", ".", "--trust-code", "launch.nproc_per_node=2"]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
        assert done.returncode == code, done.stderr
        assert not canary.exists()
        assert ("lies in the folder of the checkpoint" in done.stderr) == bool(code), done.stderr
