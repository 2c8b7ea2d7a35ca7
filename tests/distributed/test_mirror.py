"""A run whose machine is lost goes on elsewhere from its mirror, with the bits of one that was never disturbed."""

import json
import shutil
from pathlib import Path

import pytest

from tests.zygote.client import Ending, Zygote

SETTINGS = (
    "data=synthetic", "data.seq_len=16", "data.num_sequences=64", "model=mlp", "model.hidden_size=8",
    "train.micro_batch_size=2", "train.virtual_ranks=2", "train.eval_every=0", "train.sample_tokens=0",
    "launch.device=cpu", "launch.threads_per_rank=1",
)  # fmt: skip


@pytest.fixture
def start(zygote: Zygote, tmp_path: Path):
    """Starts a run in a folder of its own name."""

    def launch(name: str, *settings: str) -> Ending:
        return zygote.run([*SETTINGS, f"hydra.run.dir={name}", *settings], tmp_path)

    return launch


def result_of(folder: Path) -> dict:
    return json.loads((folder / "result.json").read_text())


def test_an_empty_machine_goes_on_from_the_mirror_at_another_stage_and_number_of_ranks(start, tmp_path: Path) -> None:
    mirror = f"checkpoint.mirror=file://{tmp_path}/there"
    first = ("checkpoint.every=2", "checkpoint.asynchronous=false", "launch.nproc_per_node=2", mirror)
    assert start("lost", *first, "train.max_steps=5", "zero.stage=3").code == 0
    facts = {"url": f"file://{tmp_path}/there", "newest": "step-00000005", "failures": 0, "problem": None}
    assert result_of(tmp_path / "lost")["mirror"] == facts
    assert sorted(path.name for path in (tmp_path / "there").iterdir()) == ["step-00000004", "step-00000005"]
    shutil.rmtree(tmp_path / "lost")
    new = start("new", mirror, "train.max_steps=8")
    assert (new.code, new.err.splitlines()) == (2, [
        f"checkpoint.mirror: got file://{tmp_path}/there, which has checkpoints of another run, up to step-00000005; "
        "checkpoint.resume=auto goes on from the newest; or give a URL of its own"
    ])  # fmt: skip
    (tmp_path / "there" / "step-00000005" / "rank-00001.safetensors").unlink()
    ended = start("on", mirror, "train.max_steps=8", "checkpoint.resume=auto", "zero.stage=1")
    assert ended.code == 0, ended.err
    assert "fetched step-00000004 from file://" in ended.out
    assert "has a step-00000005 that cannot be fetched" in ended.out
    (tmp_path / "half" / "step-00000002").mkdir(parents=True)  # the machine was lost during its first copy
    half = start("half_run", f"checkpoint.mirror=file://{tmp_path}/half", "train.max_steps=1", "checkpoint.resume=auto")
    assert (half.code, result_of(tmp_path / "half_run")["mirror"]["newest"]) == (0, "step-00000001")
    assert "has no whole step-00000002: its copy was cut off" in half.out
    assert start("undisturbed", "train.max_steps=8", "zero.stage=0").code == 0
    on, undisturbed = result_of(tmp_path / "on"), result_of(tmp_path / "undisturbed")
    assert on["weights_sha256"] == undisturbed["weights_sha256"]
    assert on["mirror"]["newest"] == "step-00000008"


@pytest.mark.parametrize(
    ("url", "line"),
    [
        (
            "there",
            "checkpoint.mirror: got there; it must be a URL such as s3://bucket/run, or null; the default is null",
        ),
        ("nope://there", "checkpoint.mirror: got nope://there; Protocol not known: nope"),
        (
            "s3://me:secret@bucket/run",
            "checkpoint.mirror: got a URL with a password, which would stand in files of the run; leave it out, and "
            "set it where fsspec finds it, such as in the environment",
        ),
        (
            "file:///proc/self/mem/run",
            "checkpoint.mirror: file:///proc/self/mem/run cannot be listed: [Errno 20] Not a directory: "
            "'/proc/self/mem/run'; it alone may have checkpoints to go on from; mend that, or give "
            "checkpoint.resume=null to begin anew",
        ),
    ],
)
def test_a_mirror_that_cannot_be_is_one_line(url: str, line: str, start, tmp_path: Path) -> None:
    ended = start("run", f"checkpoint.mirror='{url}'", "checkpoint.resume=auto", "train.max_steps=1")
    assert (ended.code, ended.err.splitlines()) == (2, [line])
    assert "secret" not in ended.out + ended.err
