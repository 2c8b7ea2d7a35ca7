"""examples/*.py of own loops: each is short, runs, and keeps what its first lines say."""

import shutil
from pathlib import Path

import pytest

from tests.zygote.client import Zygote

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
SMALL = ("--text", "text.txt", "--seq-len=16", "--hidden-size=16", "--layers=1", "--batch=2", "--steps=4", "--every=2")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copy(EXAMPLES / "pretrain.py", tmp_path)
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 400)
    return tmp_path


def test_pretraining_goes_on_from_its_checkpoint_on_other_ranks_at_another_stage(folder: Path, zygote: Zygote):
    assert len((folder / "pretrain.py").read_text().splitlines()) <= 150
    shas = []
    for command in ([*TORCHRUN, "pretrain.py", "--stage=3"], ["pretrain.py", "--stage=1"]):
        ending = zygote.run_python([*command, *SMALL], folder, {"XDG_CACHE_HOME": str(folder), "OMP_NUM_THREADS": "1"})
        assert ending.code == 0, ending.out + ending.err
        shas.append(ending.out.splitlines()[-1])
        shutil.rmtree(folder / "pretrained" / "step-00000004")  # the second goes on from the step before
    assert "sha256" in shas[0]
    assert shas[0] == shas[1]
    assert "step 2: validation" not in ending.out
