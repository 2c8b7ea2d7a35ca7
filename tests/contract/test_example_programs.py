"""examples/*.py that are programs: each is short, runs, and keeps what its first lines say."""

import json
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.zygote.client import Zygote
from zerotrain.commands.tokenizer import train_tokenizer

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


def test_an_export_is_evaluated_by_lm_eval(folder: Path, zygote: Zygote):
    program = EXAMPLES / "evaluate_with_lm_eval.py"
    assert len(program.read_text().splitlines()) <= 80
    ending = zygote.run_python([str(program), "exported"], folder)
    assert (ending.code, ending.err) == (1, "give --text FILE or --tasks NAMES\n")
    if find_spec("lm_eval") is None:
        ending = zygote.run_python([str(program), "exported", "--text", "text.txt"], folder)
        assert (ending.code, ending.err) == (1, "lm-eval is not installed; pip install lm-eval\n")
        return
    transformers = pytest.importorskip("transformers")
    train_tokenizer({"path": str(folder / "text.txt")}, folder / "exported", 300, 1.0)
    config = transformers.GPT2Config(n_embd=16, n_layer=1, n_head=2, n_positions=32, vocab_size=300)
    transformers.GPT2LMHeadModel(config).save_pretrained(folder / "exported")
    ending = zygote.run_python([str(program), "exported", "--text", "text.txt"], folder, {"HF_HUB_OFFLINE": "1"})
    assert ending.code == 0, ending.err
    name, metrics = ending.out.splitlines()[-1].split(" ", 1)
    assert name == "own_text"
    assert 0 < json.loads(metrics)["bits_per_byte,none"] < 20
