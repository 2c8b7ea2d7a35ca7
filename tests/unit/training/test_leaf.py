"""What one virtual rank adds to a step can be computed alone, by the Trainer that knows its data and seeds."""

from functools import partial
from typing import Any

import pytest
import torch

import zerotrain
from tests.unit.engine.parts import sum_by_tree
from zerotrain.models import GPT

VIRTUAL_RANKS = 4


class Ragged(torch.utils.data.Dataset[Any]):
    """Another number of labels that count in each sequence, in some none."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        ids, labels = self.dataset[row]
        labels = labels.clone()
        labels[: row % (len(labels) + 1)] = -100
        return ids, labels


@pytest.mark.parametrize("is_ragged", [False, True])
def test_the_leaves_of_a_step_are_its_gradient(make_trainer: Any, dataset: Any, is_ragged: bool) -> None:
    if is_ragged:
        dataset.train = Ragged(dataset.train)

    def trainer(max_steps: int) -> Any:
        torch.manual_seed(0)
        engine = zerotrain.build_engine(
            GPT(vocab_size=32, max_seq_len=16, num_layers=1, num_heads=2, hidden_size=16, dropout=0.2),
            optimizer=partial(torch.optim.SGD, lr=1.0),
            virtual_ranks=VIRTUAL_RANKS,
        )
        made = make_trainer(engine=engine, max_steps=max_steps, gradient_accumulation_steps=2, micro_batch_size=2)
        made.run()
        return made

    two, three = trainer(2), trainer(3)
    leaves = [two.leaf(number) for number in reversed(range(VIRTUAL_RANKS))][::-1]
    before, after = two.engine.full_state_dict(), three.engine.full_state_dict()
    for name in leaves[0]:
        mean = sum_by_tree([leaf[name] for leaf in leaves]) / VIRTUAL_RANKS
        assert torch.equal(after[name], before[name] - mean), name
    with pytest.raises(ValueError, match="virtual_rank=4: there are 4; give 0 to 3"):
        two.leaf(VIRTUAL_RANKS)
