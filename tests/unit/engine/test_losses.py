"""What a loss weighs, and what a model adds to it: as in plain PyTorch at every stage. With threads as ranks."""

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import zerotrain
from tests.unit.engine.habits import EVERYWHERE, SGD, assert_same, in_our_engine, in_plain_pytorch

# ---- what weighs nothing


class Labelled(nn.Module):
    """The mean over the labels that are not -100, as three people write it. Of none it is nan, or its gradient is."""

    def __init__(self, mean: str) -> None:
        super().__init__()
        self.mean = mean
        self.embedding = nn.Embedding(7, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.head = nn.Linear(8, 7)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(ids)
        for block in self.blocks:
            hidden = hidden + block(hidden).tanh()
        logits = self.head(hidden).float().flatten(0, 1)
        labels = labels.flatten()
        if self.mean == "torch's":
            return F.cross_entropy(logits, labels)
        if self.mean == "of those chosen":
            return F.cross_entropy(logits[labels >= 0], labels[labels >= 0])
        losses = F.cross_entropy(logits, labels.clamp(min=0), reduction="none")
        return (losses * (labels >= 0)).sum() / (labels >= 0).sum()


def half_of_them_without_labels(step: int, rank: int) -> list[tuple[tuple[torch.Tensor, ...], float]]:
    """Two micro-batches; of rank 0 none has a label in step 0, of the others the second has none."""
    tokens = torch.randint(7, (2, 2, 6), generator=torch.Generator().manual_seed(10 * step + rank))
    weights = [float(rank > 0 or step > 0), 0.5 * (rank == 0 and step > 0)]
    ids, labels = tokens[:, :, :-1], tokens[:, :, 1:].clone()
    return [
        ((ids[i], labels[i] if weight else torch.full_like(labels[i], -100)), weight)
        for i, weight in enumerate(weights)
    ]


@pytest.mark.case(
    "losses",
    "A micro-batch without any label, its loss or its gradient nan; `weight=0` in `backward` and `train_step`",
    "nothing of it reaches a gradient or a sum; same bits as without it",
)
@EVERYWHERE
def test_a_micro_batch_of_weight_0_reaches_no_gradient_and_no_sum_though_its_loss_is_nan(stage, size, precision):
    for mean in ("torch's", "of those chosen", "summed"):
        make = functools.partial(Labelled, mean)
        expected = in_plain_pytorch(make, half_of_them_without_labels, size, precision)
        assert_same(in_our_engine(make, half_of_them_without_labels, size, stage, precision), expected)


# ---- what a model adds to its loss

MIXTRAL = {"model_type": "mixtral", "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
MIXTRAL |= {"num_key_value_heads": 1, "intermediate_size": 8, "num_local_experts": 4, "max_position_embeddings": 8}
MIXTRAL |= {"output_router_logits": True, "router_aux_loss_coef": 5.0}


class OwnLoss(nn.Module):
    """Mixtral with the loss that transformers computes, of unshifted labels."""

    def __init__(self) -> None:
        super().__init__()
        transformers = pytest.importorskip("transformers")
        config = transformers.AutoConfig.for_model(**MIXTRAL, vocab_size=30)
        self.model = transformers.AutoModelForCausalLM.from_config(config).train()

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=ids, labels=ids.contiguous()).loss


def mixtral() -> nn.Module:
    from zerotrain.models import HuggingFaceModel

    return HuggingFaceModel(config=MIXTRAL, vocab_size=30)


def rows_of_text(step: int, rank: int) -> list[tuple[tuple[torch.Tensor, ...], float]]:
    ids = torch.randint(30, (2, 2, 7), generator=torch.Generator().manual_seed(10 * step + rank))
    return [((each, F.pad(each[:, 1:], (0, 1), value=-100)), 0.5) for each in ids]


@pytest.mark.case(
    "models: What is built into a model",
    "Balancing losses of transformers (`output_router_logits`)",
    "trained by `model=huggingface` with the model's own coefficient; a coefficient without it is refused",
)
@EVERYWHERE
@pytest.mark.thinned(2, first=1)
def test_the_balancing_loss_of_a_mixture_of_experts_is_trained_as_transformers_weighs_it(stage, size, precision):
    pytest.importorskip("transformers")
    expected = in_plain_pytorch(OwnLoss, rows_of_text, size, precision)
    got = in_our_engine(mixtral, rows_of_text, size, stage, precision)
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value, rtol=2e-2, atol=2e-3 if precision == "bf16" else 1e-6)


# ---- what train_step takes


@pytest.mark.case(
    "losses",
    "A dict for a micro-batch; a model that returns a dict, an object or a tuple",
    "`train_step` takes named inputs, and of outputs their `loss`, or the one number of a tuple; if it finds none, it "
    "says so, and `backward` takes a loss from anywhere",
)
def test_train_step_takes_named_inputs_and_weights_in_a_tensor():
    ids, labels = torch.randint(7, (2, 2, 6), generator=torch.Generator().manual_seed(0)).unbind()
    norms = []
    for micro_batch in ((ids, labels), {"ids": ids, "labels": labels}):
        torch.manual_seed(0)
        engine = zerotrain.build_engine(Labelled("torch's"), optimizer=SGD)
        norms.append(engine.train_step([micro_batch] * 2, weights=torch.tensor([0.25, 0.75])).grad_norm)
    assert norms[0] == norms[1] > 0


class GivesAList(Labelled):
    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return super().forward(ids, labels).reshape(1)


@pytest.mark.case("losses", "A loss of shape (1,), as `nn.DataParallel` has it", "same bits as of shape ()")
def test_train_step_takes_a_loss_of_one_number_in_a_list():
    ids, labels = torch.randint(7, (2, 2, 6), generator=torch.Generator().manual_seed(0)).unbind()
    got, seen = [], []
    for kind in (Labelled, GivesAList):
        torch.manual_seed(0)
        engine = zerotrain.build_engine(kind("torch's"), optimizer=SGD)
        result = engine.train_step([(ids, labels)] * 2, after_each=lambda *args: seen.append(args[2].shape))
        got.append((result.loss, result.mean_loss, engine.weights_sha256()))
    assert got[0] == got[1]
    assert set(seen) == {()}


class Gives(Labelled):
    """A model whose outputs have others beside the loss."""

    def __init__(self, outputs: Callable[[torch.Tensor], Any]) -> None:
        super().__init__("torch's")
        self.outputs = outputs

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> Any:
        return self.outputs(super().forward(ids, labels))


LOGITS = torch.zeros(2, 6, 7)
WITH_LOSS: dict[str, Callable[[torch.Tensor], Any]] = {
    "alone": lambda loss: loss,
    "in a dict": lambda loss: {"logits": LOGITS, "loss": loss, "z_loss": loss * 2},
    "in an object": lambda loss: SimpleNamespace(loss=loss, z_loss=loss * 2),
    "first": lambda loss: (loss, LOGITS, None),
    "last": lambda loss: (LOGITS, loss),
    "beside one row of one number": lambda loss: [torch.zeros(1), loss],
}


@pytest.mark.case("losses", "A dict for a micro-batch; a model that returns a dict, an object or a tuple")
@pytest.mark.parametrize("where", WITH_LOSS)
def test_train_step_takes_the_loss_out_of_what_a_model_returns(where: str):
    ids, labels = torch.randint(7, (2, 2, 6), generator=torch.Generator().manual_seed(0)).unbind()
    hashes = []
    for outputs in (WITH_LOSS["alone"], WITH_LOSS[where]):
        torch.manual_seed(0)
        engine = zerotrain.build_engine(Gives(outputs), optimizer=SGD)
        engine.train_step([(ids, labels)])
        hashes.append(engine.weights_sha256())
    assert hashes[0] == hashes[1]


@pytest.mark.case("losses", "A dict for a micro-batch; a model that returns a dict, an object or a tuple")
def test_what_train_step_cannot_take_is_said():
    ids = torch.randint(7, (2, 6))
    engine = zerotrain.build_engine(Labelled("torch's"), optimizer=SGD)
    with pytest.raises(zerotrain.EngineStateError, match=r"got a tensor for a micro-batch; give it as a sequence"):
        engine.train_step((ids, ids))
    for kind, outputs in (("dict", lambda loss: {"error": loss}), ("tuple", lambda loss: (loss, {}, loss * 2))):
        engine = zerotrain.build_engine(Gives(outputs), optimizer=SGD)
        with pytest.raises(zerotrain.EngineStateError, match=f"backward got a {kind}; give it the loss"):
            engine.train_step([(ids, ids)])
        engine.backward(engine(ids, ids)["error" if kind == "dict" else 0])
        assert engine.step().grad_norm > 0
