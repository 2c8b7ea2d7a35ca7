"""Chats trained on ranks: padded, grouped by length and packed they give the updates of plain PyTorch on each alone."""

import copy
import json
import shlex
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from cases import trainer_of
from commands import REPOSITORY, result_of

import zerotrain
from tests.contract.test_docs import blocks_of
from tests.ranks import run_ranks
from tests.unit.data.chat_templates import chat_tokenizer
from tests.unit.data.tokenizers_made import saved
from tests.zygote.client import Zygote
from zerotrain.data import ChatDataset, GlobalBatchSampler
from zerotrain.models import GPT

NUM_STEPS, ROWS, LR = 3, 8, 0.5
WAYS: dict[str, dict[str, Any]] = {"padded": {}, "grouped": {"group_by_length": True}, "packed": {"pack": True}}


def chats(folder: Path, **settings: Any) -> ChatDataset:
    usual = {"tokenizer": str(folder), "template": "chatml", "seq_len": 160, "cache_dir": str(folder / "cache")}
    return ChatDataset(str(folder / "chats.jsonl"), **usual | settings)


def model() -> GPT:
    torch.manual_seed(0)
    return GPT(vocab_size=600, max_seq_len=160, num_layers=2, num_heads=2, hidden_size=16)


def plain_pytorch(data: ChatDataset) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Weights after some steps of which each chat is read alone, and the loss of each step."""
    trained, losses, rows = model(), [], data.train
    optimizer = torch.optim.SGD(trained.parameters(), lr=LR)
    sampler = GlobalBatchSampler(
        num_sequences=len(rows), micro_batch_size=ROWS, num_micro_batches=1, rank=0, num_ranks=1, seed=0,
        order=rows.order,
    )  # fmt: skip
    for batch, _ in zip(sampler, range(NUM_STEPS), strict=False):
        chats_of_step = [chat for row in batch for chat in ([row] if rows.bins is None else rows.bins[row])]
        total, count = torch.zeros(()), 0
        for tokens, is_learnt in map(rows.read, chats_of_step):
            ids, learnt = torch.from_numpy(tokens), torch.from_numpy(is_learnt)[1:]
            logits = trained(ids[None, :-1])[0]
            total = total + F.cross_entropy(logits[learnt], ids[1:][learnt], reduction="sum")
            count += int(learnt.sum())
        loss = total / count
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return copy.deepcopy(trained.state_dict()), losses


def trained(folder: Path, num_micro_batches: int) -> dict[tuple[str, int], tuple[dict[str, torch.Tensor], list[float]]]:
    """By way and stage: the weights after some steps, and the losses."""
    world, found = zerotrain.World.current(torch.device("cpu")), {}
    for way, settings in WAYS.items():
        for stage in (0, 3):
            engine = zerotrain.build_engine(
                model(), optimizer=partial(torch.optim.SGD, lr=LR), world=world,
                zero=zerotrain.ZeroConfig(stage=stage, bucket_mb=0.01),
            )  # fmt: skip
            run_dir = folder / f"{way} {stage} {world.size} {num_micro_batches} {world.rank}"
            run_dir.mkdir()
            trainer_of(
                engine, chats(folder, **settings), run_dir, max_steps=NUM_STEPS,
                micro_batch_size=ROWS // (world.size * num_micro_batches),
                gradient_accumulation_steps=num_micro_batches,
            ).run()  # fmt: skip
            lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines()) if world.rank == 0 else ()
            losses = [line["train_loss"] for line in lines if "train_loss" in line]
            found[way, stage] = {key: value.clone() for key, value in engine.full_state_dict().items()}, losses
    return found


@pytest.mark.case(
    "data: Chats",
    "padded, grouped by length and packed; 1 x 8, 2 x 4 and 2 x 2 x 2 (ranks x micro-batches x rows); stages 0 and 3",
    "losses and updates of plain PyTorch with each chat alone, to 1e-6",
)
@pytest.mark.parametrize(("ranks", "micro_batches"), [(1, 1), (2, 1), (2, 2)], ids=["1 x 8", "2 x 4", "2 x 2 x 2"])
def test_chats_give_the_losses_and_updates_of_plain_pytorch(tmp_path: Path, ranks: int, micro_batches: int) -> None:
    saved("bytes, GPT-2", tmp_path, eos_token="<|endoftext|>")
    numbers = np.random.default_rng(1)
    with (tmp_path / "chats.jsonl").open("w") as file:
        for num_answers in numbers.integers(1, 4, 200):
            turns = [
                {"role": role, "content": "ab " * int(numbers.integers(1, 9))}
                for _ in range(num_answers)
                for role in ("user", "assistant")
            ]
            file.write(json.dumps({"messages": turns}) + "\n")
    expected = {way: plain_pytorch(chats(tmp_path, **settings)) for way, settings in WAYS.items()}
    begun = model().state_dict()
    [first, *_] = run_ranks(trained, ranks, tmp_path, micro_batches)
    for (way, _), (weights, losses) in first.items():
        plain_weights, plain_losses = expected[way]
        assert losses == pytest.approx(plain_losses, rel=1e-6)
        for name, value in plain_weights.items():
            torch.testing.assert_close(weights[name] - begun[name], value - begun[name], atol=1e-6, rtol=0)
    assert len({tuple(losses) for _, losses in first.values()}) == len(WAYS)


SMALL = (
    "launch.nproc_per_node=2 launch.threads_per_rank=1 data.seq_len=64 train.max_steps=60 "
    "train.micro_batch_size=4 train.eval_every=0 train.sample_tokens=8 optimizer.lr=0.05 data.validation_fraction=0.5 "
    "data.pack=true"
)


def test_the_commands_of_the_guide_train_a_llama_with_adapters_without_python(zygote: Zygote, tmp_path: Path) -> None:
    """Of random weights and two rows, learnt by heart: it answers as it was taught, and its adapters are exported."""
    transformers = pytest.importorskip("transformers")
    guide, model = REPOSITORY / "docs/guides/chat.md", tmp_path / "path/to/model"
    chat_tokenizer(model)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes["initializer_range"] = 0.3
    transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=603, **sizes)).save_pretrained(model)
    (tmp_path / "chats.jsonl").write_text(blocks_of(guide, "json")[0] * 20)
    [train, generate, export] = blocks_of(guide, "sh")[0].splitlines()
    printed = []
    for command, changes in ((train, SMALL), (generate, "--max-tokens 8 --temperature 0"), (export, "")):
        words = shlex.split(f"{command.removeprefix('python ')} {changes}")
        program = [str(REPOSITORY / "launch.py")] if words[0] == "launch.py" else ["-m", "zerotrain"]
        ending = zygote.run_python([*program, *words[1:]], tmp_path)
        assert ending.code == 0, ending.out + ending.err
        printed.append(ending.out)
    assert "learns answers" in printed[0]
    assert ">>dog<|im_end|>\n<<" in printed[0] or ">>cat<|im_end|>\n<<" in printed[0]
    result = result_of(tmp_path / "outputs/run")
    assert result["final_train_loss"] < 0.5
    assert printed[1].strip() == "Say dog.dog"  # and no token behind the end of the answer
    assert {"adapter_model.safetensors", "chat_template.jinja"} <= {
        file.name for file in (tmp_path / "exported").iterdir()
    }
