import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.zygote.client import Zygote
from zerotrain.training.callbacks.loggers import tag_of

TINY = [
    "data=synthetic", "data.seq_len=16", "data.num_sequences=64", "model=mlp", "model.hidden_size=8",
    "train.max_steps=6", "train.micro_batch_size=2", "train.log_every=1", "train.eval_every=3", "train.eval_batches=1",
    "train.sample_tokens=0", "launch.device=cpu", "launch.nproc_per_node=2", "launch.threads_per_rank=1",
    "checkpoint.every=2", "checkpoint.asynchronous=false", "hydra.run.dir=run",
]  # fmt: skip
"""Settings of a run of two ranks and six steps, which saves every two."""
SAME = ("train_loss", "val_loss", "grad_norm", "lr", "samples")
"""Numbers that are the same however often the run is killed."""


@pytest.fixture
def curves_of() -> Callable[[Path], dict[str, list[tuple[int, float]]]]:
    """{name: [(step, value)]} of a metrics.jsonl."""

    def read(folder: Path) -> dict[str, list[tuple[int, float]]]:
        found: dict[str, list[tuple[int, float]]] = {}
        for line in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()):
            for name, value in line.items():
                if name != "step" and value is not None:
                    found.setdefault(name, []).append((line["step"], value))
        return found

    return read


@pytest.fixture
def changed_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The working folder is a git repository with a change that no commit has."""
    folder = tmp_path / "code"
    folder.mkdir()
    git = ["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@b.c"]
    (folder / "model.py").write_text("old = 1\n")
    for arguments in (["init", "-q"], ["add", "model.py"], ["commit", "-qm", "first"]):
        subprocess.run([*git, *arguments], check=True)
    (folder / "model.py").write_bytes(b"new = '\xff'\n")
    monkeypatch.chdir(folder)


@pytest.fixture
def killed_twice(zygote: Zygote, tmp_path: Path) -> Callable[..., Path]:
    """Trains six steps of a logger; the run is killed after step 3, restarted, killed after step 5, and resumed."""

    def train(*logger: str, **environment: str) -> Path:
        killing = "+callbacks.killing={_target_: killing.Killing, steps: [3, 5]}"
        settings = [*TINY, *logger, killing, "launch.max_restarts=1", "checkpoint.resume=auto"]
        ended = [zygote.run(settings, tmp_path, environment) for _ in range(2)]
        assert [each.code for each in ended] == [1, 0], ended
        assert "does not warn" not in (tmp_path / "run/ranks/0.log").read_text()
        return tmp_path / "run"

    return train


@pytest.fixture
def require_one_curve(curves_of) -> Callable[[Path, dict[str, Any]], None]:
    """Makes sure that the curves there are those of metrics.jsonl: no point doubled, lost or stray."""

    def require(folder: Path, there: dict[str, Any]) -> None:
        here = {tag_of(name): points for name, points in curves_of(folder).items()}
        assert [step for step, _ in here["train/loss"]] == [1, 2, 3, 4, 5, 6]
        steps = {name: [step for step, _ in points] for name, points in there.items()}
        assert {name: steps.get(name) for name in here} == {name: [step for step, _ in here[name]] for name in here}
        same = [tag_of(name) for name in SAME]
        assert {name: there[name] for name in same} == {name: here[name] for name in same}

    return require
