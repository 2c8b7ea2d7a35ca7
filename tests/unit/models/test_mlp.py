import math

import pytest
import torch
from torch import nn

from zerotrain.models import MLP

SMALL_MLP = {"vocab_size": 50, "context": 3, "hidden_size": 32, "num_layers": 2}


@pytest.fixture
def mlp() -> MLP:
    torch.manual_seed(0)
    return MLP(**SMALL_MLP)


def random_contexts(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(SMALL_MLP["vocab_size"], shape, generator=torch.Generator().manual_seed(seed))


def test_a_prediction_depends_on_the_last_context_tokens_alone(mlp):
    ids = random_contexts(1, 10)
    before = mlp(ids)
    for position in range(10):
        changed = ids.clone()
        changed[0, position] = (changed[0, position] + 1) % 50
        differs = (mlp(changed) != before).any(dim=-1)[0].tolist()
        assert differs == [position <= t < position + 3 for t in range(10)]


def test_the_loss_of_the_mlp_is_the_mean_over_the_labels_that_count(mlp):
    ids, labels = random_contexts(2, 6), random_contexts(2, 6, seed=2)
    labels[1, :4] = -100
    log_probabilities = mlp(ids).log_softmax(-1)
    counted = [-log_probabilities[b, t, labels[b, t]] for b in range(2) for t in range(6) if labels[b, t] != -100]
    torch.testing.assert_close(mlp(ids, labels), torch.stack(counted).mean())


def test_it_learns_what_follows_what(mlp):
    ids = torch.arange(20).repeat(4, 2)
    labels = (ids + 1) % 20
    optimizer = torch.optim.AdamW(mlp.parameters(), lr=1e-2)
    for _ in range(30):
        loss = mlp(ids, labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert loss.item() < 0.1 < math.log(20)


def test_its_repeated_blocks_are_in_one_module_list(mlp):
    lists = [module for module in mlp.modules() if isinstance(module, nn.ModuleList)]
    assert lists == [mlp.blocks]
    assert len(mlp.blocks) == 2


@pytest.mark.parametrize("name", SMALL_MLP)
def test_a_wrong_argument_of_the_mlp_is_refused_by_name(name):
    with pytest.raises(ValueError, match=f"model.{name}=0 is too small; it must be at least 1"):
        MLP(**SMALL_MLP | {name: 0})
