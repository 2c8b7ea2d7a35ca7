"""examples/*.py that are programs: each is short, runs, and keeps what its first lines say."""

import json
import shlex
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.unit.data.chat_templates import chat_tokenizer
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
        assert "UserWarning" not in ending.err
        shas.append(ending.out.splitlines()[-1])
        shutil.rmtree(folder / "pretrained" / "step-00000004")  # the second goes on from the step before
    assert "sha256" in shas[0]
    assert shas[0] == shas[1]
    assert "step 2: validation" not in ending.out


def commands_in(example: Path) -> list[list[str]]:
    """What follows each `launch.py` in the head of an example, in words of a shell."""
    head = example.read_text().split('"""')[1] if example.suffix == ".py" else example.read_text().replace("# ", "")
    parts = head.replace("\\\n", " ").split("launch.py ")[1:]
    return [
        shlex.split(part.partition("\n\n")[0] if example.suffix == ".py" else part.splitlines()[0]) for part in parts
    ]


@pytest.mark.slow
def test_images_are_told_apart_by_a_network_with_batch_norm_and_by_a_transformer(tmp_path: Path, zygote: Zygote):
    pytest.importorskip("transformers")
    program = EXAMPLES / "image_classifier.py"
    assert len(program.read_text().splitlines()) < 80
    losses = []
    for number, command in enumerate(commands_in(program)):
        few = ["train.num_epochs=null", "train.max_steps=2"] if number else ["train.num_epochs=2"]
        run = ["launch.nproc_per_node=2", f"hydra.run.dir=run{number}", "launch.threads_per_rank=1"]
        ending = zygote.run([*command, *few, *run], tmp_path, {"PYTHONPATH": str(EXAMPLES)})
        assert ending.code == 0, ending.out + ending.err
        assert "1,500 rows to train on" in ending.out
        losses.append(json.loads((tmp_path / f"run{number}/result.json").read_text())["final_val_loss"])
    assert losses[0] < 0.9
    assert losses[1] < 1.5


def test_chats_are_learnt_by_adapters_of_a_yaml_alone(tmp_path: Path, zygote: Zygote):
    transformers, example = pytest.importorskip("transformers"), EXAMPLES.parent / "conf/experiment/chat_lora.yaml"
    assert len(example.read_text().splitlines()) < 80
    chat_tokenizer(tmp_path / "path/to/model")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlamaConfig(vocab_size=603, **sizes)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "path/to/model")
    row = next(line for line in example.read_text().splitlines() if '"messages"' in line).removeprefix("#").strip()
    (tmp_path / "chats.jsonl").write_text(f"{row}\n" * 40)
    [command] = commands_in(example)
    few = ["launch.nproc_per_node=2", "launch.threads_per_rank=1", "train.micro_batch_size=2", "train.num_epochs=2"]
    ending = zygote.run([*command, *few], tmp_path)
    assert ending.code == 0, ending.out + ending.err
    result = json.loads((tmp_path / "outputs/chat_lora/result.json").read_text())
    assert result["steps"] == 5  # of 38 chats, 16 to a step
    assert "frozen" in ending.out


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
