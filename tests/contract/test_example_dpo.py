"""examples/dpo.py: by torchrun as in plain PyTorch, and by the command in its head."""

import importlib.util
import json
import math
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from zerotrain.models import MLP

REPOSITORY = Path(__file__).resolve().parents[2]
EXAMPLE = REPOSITORY / "examples/dpo.py"
PATHS = os.pathsep.join([str(REPOSITORY), str(EXAMPLE.parent)])


def plain_losses(num_steps: int) -> tuple[list[float], torch.Tensor]:
    """The losses of all pairs before each step in plain PyTorch, and the reference's log-probabilities."""
    spec = importlib.util.spec_from_file_location("dpo", EXAMPLE)
    dpo = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(dpo)
    torch.manual_seed(0)
    policy = MLP(vocab_size=256, context=dpo.CONTEXT, hidden_size=256, num_layers=2)
    batch, losses = dpo.collate(dpo.Pairs("").train), []
    scores = {"ids": batch["ids"], "is_answer": batch["is_answer"]}
    for _ in range(num_steps):
        tokens = policy(scores["ids"])[:, :-1].log_softmax(dim=-1).gather(2, scores["ids"][:, 1:, None])[..., 0]
        answers = (tokens * scores["is_answer"][:, 1:]).sum(dim=1)
        reference = answers.detach() if not losses else reference  # noqa: F821 of the first step
        chosen, rejected = (answers - reference).chunk(2)
        loss = (1 + (-dpo.BETA * (chosen - rejected)).exp()).log().mean()
        policy.zero_grad()
        loss.backward()
        losses.append(loss.item())
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter -= 0.5 * parameter.grad
    return losses, reference


@pytest.mark.slow
def test_pairs_are_learnt_in_an_own_loop_as_in_plain_pytorch_and_by_the_launcher(tmp_path: Path):
    lines = EXAMPLE.read_text().splitlines()
    assert len(lines) < 80
    losses, reference = plain_losses(20)
    ranks = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(EXAMPLE)]
    done = subprocess.run(ranks, cwd=tmp_path, env=os.environ | {"PYTHONPATH": PATHS}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    ends = [float(end) for end in re.findall(r"and (\d\.\d{4}) at the end", done.stdout)]
    assert sum(ends) / 2 == pytest.approx(losses[-1], abs=1e-4)
    torch.testing.assert_close(torch.load(tmp_path / "reference.pt"), reference.view(2, -1).T, atol=1e-5, rtol=1e-6)
    head = EXAMPLE.read_text().partition("launch.py ")[2].partition('"""')[0]
    settings = head.replace("\\\n", " ")
    few = "train.max_steps=2 train.micro_batch_size=32 train.log_every=1 hydra.run.dir=run launch.nproc_per_node=2"
    launch = [
        sys.executable,
        str(REPOSITORY / "launch.py"),
        *shlex.split(f"{settings} {few} optimizer=sgd optimizer.lr=0.5"),
    ]
    run = subprocess.run(launch, cwd=tmp_path, env=os.environ | {"PYTHONPATH": PATHS}, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    metrics = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    first, second = (entry["train_loss"] for entry in metrics if "train_loss" in entry)
    assert first == pytest.approx(math.log(2), abs=1e-5)
    assert second < first
