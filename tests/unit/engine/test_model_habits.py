"""What users build into a model, and what its losses are: as in plain PyTorch, or a sentence. With threads as ranks."""

import functools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import zerotrain
from zerotrain.testing.fake_wire import run_threads

SGD = functools.partial(torch.optim.SGD, lr=0.1)
LOSS_SCALE = 256.0
"""In fp16."""
ALONE = threading.Lock()
"""The random number generator is one for all threads."""
EVERYWHERE = pytest.mark.parametrize(
    ("stage", "size", "precision"),
    [(stage, size, precision) for stage in range(4) for size in (2, 3) for precision in ("fp32", "bf16")],
)


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    with ALONE:
        torch.manual_seed(0)
        return make()


def build(world: zerotrain.World, stage: int, precision: str, model: nn.Module) -> zerotrain.ZeroEngine:
    zero = zerotrain.ZeroConfig(stage=stage, bucket_mb=0.0005, reduction="ordered")
    given = zerotrain.PrecisionConfig(precision, initial_scale=LOSS_SCALE)
    return zerotrain.build_engine(model, optimizer=SGD, zero=zero, precision=given, world=world)


# ---- what is refused at the build


def of_one_memory(change: Callable[[nn.Module], object]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        change(model)
        return model

    return make


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "a whole model in fp64": (
        lambda: nn.Linear(2, 2).double(),
        r"^weight, bias are fp64, and the engine trains fp32 weights at most; call model\.float\(\) before ",
    ),
    "one parameter in fp64, frozen": (
        lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, bias=False).double().requires_grad_(False)),
        r"^1\.weight is fp64, ",
    ),
    "embedding that renormalises": (
        lambda: nn.Sequential(nn.Embedding(4, 2, max_norm=1.5)),
        r"^0 is a Embedding with max_norm=1\.5, which changes its weight in the forward by this rank's inputs alone; ",
    ),
    "bag of such": (lambda: nn.EmbeddingBag(4, 2, max_norm=2), "^the model is a EmbeddingBag with max_norm=2, "),
    "two parameters over one memory": (
        of_one_memory(lambda m: setattr(m[1], "weight", nn.Parameter(m[0].weight))),
        r"^0\.weight and 1\.weight are two parameters over one memory, .*"
        r"assign the parameter itself \(model\.1\.weight = model\.0\.weight\)",
    ),
    "a parameter of a part of another": (
        of_one_memory(lambda m: setattr(m[1], "weight", nn.Parameter(m[0].weight.detach()[1:, 1:]))),
        r"^0\.weight and 1\.weight are two parameters over one memory",
    ),
    "a buffer over a weight": (
        of_one_memory(lambda m: m.register_buffer("table", m[0].weight.detach().T)),
        r"^table is a tensor over the memory of the parameter 0\.weight, and would keep its old values in training; ",
    ),
    "an attribute over a weight": (
        of_one_memory(lambda m: setattr(m[1], "first", [m[0].weight.data[0]])),
        r"^1\.first is a tensor over the memory of the parameter 0\.weight",
    ),
    "a weight that was expanded": (
        lambda: nn.ParameterList([torch.ones(1, 3).expand(4, 3)]),
        r"^0 has several elements at one place, as expand\(\) gives them; clone\(\) it$",
    ),
}


ALSO_AS_A_FUNCTION = ("a whole model in fp64", "two parameters over one memory", "a buffer over a weight")


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_would_be_trained_otherwise_than_it_says_is_refused_and_left_as_it_was(name: str) -> None:
    make, answer = REFUSED[name]
    model = make()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    functions = [(make, zerotrain.ZeroConfig(stage=3))] * (name in ALSO_AS_A_FUNCTION)  # looks at all live objects
    for given, zero in ((model, None), *functions):
        with pytest.raises(zerotrain.ConfigError, match=answer):
            zerotrain.build_engine(given, optimizer=SGD, zero=zero)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert {value.dtype for value in model.state_dict().values()} == {value.dtype for value in before.values()}


def flat_parts() -> nn.Module:
    """Parts of one memory, as cuDNN has the weights of an LSTM: one behind the other, and columns of a matrix."""
    flat = torch.arange(32.0)
    columns = torch.arange(24.0).view(4, 6)
    return nn.ParameterList([flat[:16].view(4, 4), flat[16:], columns[:, :2], columns[:, 2:]])


def tied() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    model[1].kept = [model[0].weight]
    return model


def normalised() -> nn.Module:
    return nn.Sequential(nn.utils.spectral_norm(nn.Linear(4, 4)), nn.utils.weight_norm(nn.Linear(4, 4)))


@pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated")
def test_parts_of_one_memory_and_tied_parameters_are_taken() -> None:
    makers = [flat_parts, tied, normalised, lambda: nn.LSTM(4, 4, num_layers=2)]
    for make in makers:
        zerotrain.build_engine(make(), optimizer=SGD)
    zerotrain.build_engine(
        lambda: nn.ModuleList(make() for make in makers), optimizer=SGD, zero=zerotrain.ZeroConfig(stage=3)
    )


# ---- training as in plain PyTorch

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
MicroBatches = Callable[[int, int], list[tuple[tuple[torch.Tensor, ...], float]]]
"""(step, rank) -> the inputs of the model, which returns the loss, and the weight of each micro-batch."""


def in_plain_pytorch(
    make: Callable[[], nn.Module],
    micro_batches: MicroBatches,
    size: int,
    precision: str,
    cast: Callable[[nn.Module], object] = lambda model: None,
    steps: int = 2,
) -> dict[str, torch.Tensor]:
    """Name -> fp32 weight after training in one process: each rank's gradient apart, what weighs 0 left out.

    Args:
        cast: brings what is not computed in `precision` back to fp32.
    """
    model = seeded(make)
    weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for parameter in model.parameters():
        parameter.data = parameter.data.to(DTYPES[precision])
    cast(model)
    copy_into(model, weights)
    wire = {name: parameter.dtype for name, parameter in model.named_parameters()}
    optimizer, scale = SGD(weights.values()), LOSS_SCALE if precision == "fp16" else 1.0
    for step in range(steps):
        total = {name: torch.zeros_like(weight) for name, weight in weights.items()}
        for rank in range(size):
            mine = {name: torch.zeros_like(weight) for name, weight in weights.items()}
            for inputs, factor in micro_batches(step, rank):
                model.zero_grad()
                floats = [each.to(DTYPES[precision]) if each.is_floating_point() else each for each in inputs]
                loss = model(*floats)
                if factor:
                    (loss * (factor * scale / size)).backward()
                for name, parameter in model.named_parameters():
                    mine[name] += 0 if parameter.grad is None else parameter.grad.float()
            for name, value in mine.items():
                total[name] += value.to(wire[name]).float()
        for name, weight in weights.items():
            weight.grad = total[name].to(wire[name]).float() / scale
        optimizer.step()
        copy_into(model, weights)
    return weights


def copy_into(model: nn.Module, weights: dict[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])


def on_ranks(
    make: Callable[[], nn.Module], micro_batches: MicroBatches, size: int, stage: int, precision: str, steps: int = 2
) -> dict[str, torch.Tensor]:
    """The same with an engine on each rank, the last of which is late; and what each returned is a number."""

    def train(world: zerotrain.World) -> dict[str, torch.Tensor]:
        engine = build(world, stage, precision, seeded(make))
        for step in range(steps):
            inputs, weights = zip(*micro_batches(step, world.rank), strict=True)
            result = engine.train_step(inputs, weights=weights)
            assert not result.skipped
            assert result.loss.isfinite()
        return engine.full_state_dict()

    return run_threads(train, size, late_rank=size - 1)[0][0]


def assert_same(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert expected.keys() <= got.keys()
    for name, value in expected.items():
        assert torch.equal(got[name], value), name


# ---- batch norms


class Convnet(nn.Module):
    """Batch norms of all kinds: in blocks, without weights, without statistics, in a Sequential of nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(2, 6, 3), nn.BatchNorm2d(6), nn.ReLU())
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(6, 6, 3, padding=1), nn.BatchNorm2d(6, track_running_stats=stats), nn.GELU())
            for stats in (True, False, True)
        )
        self.norms = nn.Sequential(nn.BatchNorm2d(6, affine=False), nn.InstanceNorm2d(6, affine=True), nn.GELU())
        self.head = nn.Linear(6, 3)
        self.last = nn.BatchNorm1d(3)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        hidden = self.stem(images)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        scores = self.last(self.head(self.norms(hidden).mean(dim=(2, 3))))
        assert hidden.dtype == scores.dtype == self.head.weight.dtype
        return (scores.float() * torch.arange(1.0, 4.0)).exp().mean()


def batch_norms_in_fp32(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d | nn.InstanceNorm2d):
            in_fp32 = module.float().forward
            module.forward = lambda x, in_fp32=in_fp32: in_fp32(x.float()).to(x.dtype)


def images(step: int, rank: int) -> list[tuple[tuple[torch.Tensor, ...], float]]:
    return [((torch.randn(4, 2, 6, 6, generator=torch.Generator().manual_seed(10 * step + rank)),), 1.0)]


@pytest.mark.parametrize(
    ("stage", "size", "precision"),
    [(stage, size, precision) for stage in range(4) for size in (2, 3) for precision in ("fp32", "bf16", "fp16")],
)
def test_batch_norms_of_all_kinds_are_kept_in_fp32_without_being_named(stage: int, size: int, precision: str) -> None:
    expected = in_plain_pytorch(Convnet, images, size, precision, batch_norms_in_fp32)
    assert_same(on_ranks(Convnet, images, size, stage, precision), expected)


def test_a_batch_norm_alone_and_one_within_what_is_named_are_cast_once() -> None:
    alone = zerotrain.build_engine(nn.BatchNorm1d(4), optimizer=SGD, precision="bf16")
    assert alone(torch.randn(8, 4)).dtype == torch.bfloat16
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)))
    precision = zerotrain.PrecisionConfig("bf16", keep_fp32=["1"])
    engine = zerotrain.build_engine(model, optimizer=SGD, precision=precision)
    seen = []
    model[1][2].register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].dtype))
    assert engine(torch.randn(8, 4)).dtype == torch.bfloat16
    assert seen == [torch.float32]


# ---- the state dict


class Counting(nn.Linear):
    """Adds extra state that is computed of its weight, and renames, adds and drops keys."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.notes = {"calls": 3}
        self.register_buffer("scratch", torch.ones(2), persistent=False)
        self.register_buffer("mean", torch.arange(4.0))
        self.register_state_dict_post_hook(rename)

    def get_extra_state(self) -> dict[str, Any]:
        return self.notes | {"largest": self.weight.max().item()}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.notes = state


def rename(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    state[f"{prefix}kernel"] = state.pop(f"{prefix}weight")
    state[f"{prefix}kernel_T"] = state[f"{prefix}kernel"].T.contiguous()
    del state[f"{prefix}bias"]


class WithKeysOfItsOwn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Counting() for _ in range(3))
        self.embedding = nn.Embedding(5, 4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("table", torch.arange(3))
        self.table_again = nn.ParameterDict({"frozen": nn.Parameter(torch.ones(3), requires_grad=False)})

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(ids)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden).float().square().mean()


@EVERYWHERE
def test_the_full_state_dict_is_what_plain_pytorch_gives_with_hooks_extra_state_and_ties(
    stage: int, size: int, precision: str
) -> None:
    def on_a_rank(world: zerotrain.World) -> dict[str, Any]:
        engine = build(world, stage, precision, seeded(WithKeysOfItsOwn))
        before = [id(parameter) for parameter in engine.module.parameters()]
        engine.train_step([(torch.arange(5),)])
        state = engine.full_state_dict()
        assert [id(parameter) for parameter in engine.module.parameters()] == before
        engine.train_step([(torch.arange(5),)])
        return state

    results, _ = run_threads(on_a_rank, size, late_rank=0)
    assert results[1:] == [{}] * (size - 1)
    model = seeded(WithKeysOfItsOwn)
    trained = in_plain_pytorch(
        WithKeysOfItsOwn, lambda step, rank: [((torch.arange(5),), 1.0)], size, precision, steps=1
    )
    copy_into(model, trained)
    expected = model.state_dict()
    assert list(results[0]) == list(expected)
    assert results[0]._metadata == expected._metadata
    assert results[0]["head.weight"] is not None
    assert results[0]["head.weight"].data_ptr() == results[0]["embedding.weight"].data_ptr()
    for name, value in expected.items():
        assert torch.equal(results[0][name], value) if isinstance(value, torch.Tensor) else results[0][name] == value


# ---- torch's fast path


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 3)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
@EVERYWHERE
def test_an_encoder_gives_zeros_at_padded_places_in_evaluation_as_in_plain_pytorch(
    stage: int, size: int, precision: str
) -> None:
    padding = torch.tensor([[0, 0, 0, 0, 1, 1], [0] * 6, [0, 0, 1, 1, 1, 1]]).bool()
    x = torch.randn(3, 6, 16, generator=torch.Generator().manual_seed(1))

    def on_a_rank(world: zerotrain.World) -> tuple[torch.Tensor, ...]:
        engine = build(world, stage, precision, seeded(encoder))
        engine.backward(engine(x, src_key_padding_mask=padding).float().square().mean())
        engine.step()
        engine.eval()
        with torch.no_grad():
            first, again = (engine(x, src_key_padding_mask=padding) for _ in range(2))
        return first, again, engine.full_state_dict()

    (first, again, weights), *_ = run_threads(on_a_rank, size, late_rank=size - 1)[0]
    model = seeded(encoder)
    model.load_state_dict(weights)
    with torch.no_grad():
        x = x.to(DTYPES[precision])
        expected = model.to(DTYPES[precision]).eval()(x, src_key_padding_mask=padding)
    assert (expected[padding] == 0).all()
    for got in (first, again):
        assert (got[padding] == 0).all()
        torch.testing.assert_close(got, expected)


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


@EVERYWHERE
def test_a_micro_batch_of_weight_0_reaches_no_gradient_and_no_sum_though_its_loss_is_nan(
    stage: int, size: int, precision: str
) -> None:
    for mean in ("torch's", "of those chosen", "summed"):
        make = functools.partial(Labelled, mean)
        expected = in_plain_pytorch(make, half_of_them_without_labels, size, precision)
        assert_same(on_ranks(make, half_of_them_without_labels, size, stage, precision), expected)


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


@EVERYWHERE
def test_the_balancing_loss_of_a_mixture_of_experts_is_trained_as_transformers_weighs_it(
    stage: int, size: int, precision: str
) -> None:
    pytest.importorskip("transformers")
    expected = in_plain_pytorch(OwnLoss, rows_of_text, size, precision)
    got = on_ranks(mixtral, rows_of_text, size, stage, precision)
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value, rtol=2e-2, atol=2e-3 if precision == "bf16" else 1e-6)
