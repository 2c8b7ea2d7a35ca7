"""Direct preference optimization (arXiv 2305.18290): a loss over pairs, in your own loop and by the launcher.

    torchrun --nproc-per-node 2 examples/dpo.py     # writes policy.safetensors and reference.pt, and trains
    PYTHONPATH=examples python launch.py model=mlp model.vocab_size=256 data=own data._target_=dpo.Pairs \
        'data.collate_fn={_target_: dpo.collate, _partial_: true}' loss=own loss._target_=dpo.dpo +loss.beta=0.1 \
        checkpoint.init_from=policy.safetensors train.loss_over=rows
"""

import functools
import os

import torch
import torch.nn.functional as F
from safetensors.torch import save_file

import zerotrain
from zerotrain.models import MLP

LENGTH, NUM_PAIRS, BETA, CONTEXT = 16, 64, 0.1, 8


class Pairs:
    """Rows of (chosen and rejected bytes, which of them are the answer, the reference's log-probability of each)."""

    def __init__(self, path: str = "reference.pt") -> None:
        reference = torch.load(path, weights_only=True) if os.path.exists(path) else torch.zeros(NUM_PAIRS, 2)
        self.train = [self._row(number, reference[number]) for number in range(NUM_PAIRS)]
        self.validation = self.train[::8]

    def _row(self, number: int, reference: torch.Tensor) -> dict[str, torch.Tensor]:
        prompt, answers = f"{number}+1=", (f"{number + 1}.", f"{number - 1}!")
        ids = torch.tensor([list((prompt + answer).encode().ljust(LENGTH, b"\0")) for answer in answers])
        is_answer = (torch.arange(LENGTH) >= len(prompt)) & (ids > 0)
        return {"ids": ids, "is_answer": is_answer, "reference": reference}


def collate(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """All chosen ones, then all rejected ones: the model sees plain sequences."""
    return {name: torch.cat(torch.stack([row[name] for row in rows]).unbind(1)) for name in rows[0]}


def log_probabilities(logits: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """(sequences,): of each answer."""
    tokens = -F.cross_entropy(logits[:, :-1].float().transpose(1, 2), batch["ids"][:, 1:], reduction="none")
    return (tokens * batch["is_answer"][:, 1:]).sum(dim=1)


def dpo(logits: torch.Tensor, batch: dict[str, torch.Tensor], beta: float = BETA) -> torch.Tensor:
    """The mean over pairs."""
    chosen, rejected = (log_probabilities(logits, batch) - batch["reference"]).chunk(2)
    return -F.logsigmoid(beta * (chosen - rejected)).mean()


def main() -> None:
    torch.manual_seed(0)
    policy, pairs = MLP(vocab_size=256, context=CONTEXT, hidden_size=256, num_layers=2), Pairs("").train
    optimizer, zero = functools.partial(torch.optim.SGD, lr=0.5), zerotrain.ZeroConfig(stage=3)
    with zerotrain.World.from_environment() as world:
        engine = zerotrain.build_engine(policy, optimizer=optimizer, zero=zero, world=world)
        own = slice(world.rank, None, world.size)  # as many on each rank
        batch, reference = collate(pairs[own]), torch.zeros(NUM_PAIRS, 2)
        with torch.no_grad():  # by the policy as it begins, sharded as it is: nobody holds a second model
            batch["reference"] = log_probabilities(engine(batch["ids"]), batch)
        reference[own] = batch["reference"].view(2, -1).T
        reference, weights, losses = world.sum(reference), engine.full_state_dict(), []
        if world.rank == 0:
            torch.save(reference, "reference.pt")
            save_file(weights, "policy.safetensors")
        for _ in range(20):
            loss = dpo(engine(batch["ids"]), batch)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        print(f"rank {world.rank}: loss {losses[0]:.4f}, and {losses[-1]:.4f} at the end")


if __name__ == "__main__":
    main()
