"""What users build into a model: as in plain PyTorch at every stage. With threads as ranks."""

from typing import Any

import pytest
import torch
from torch import nn

import zerotrain
from tests.ranks.fake_wire import run_threads
from tests.unit.engine.habits import EVERYWHERE, SGD, assert_same, build, in_our_engine, in_plain_pytorch
from tests.unit.engine.parts import DTYPES, copy_into, seeded

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


@pytest.mark.case(
    "precision",
    "Batch norms (also instance norms) in bf16 and fp16, without being named",
    "kept in fp32, with fp32 inside and the compute dtype around; same bits",
)
@pytest.mark.parametrize(
    ("stage", "size", "precision"),
    [(stage, size, precision) for stage in range(4) for size in (2, 3) for precision in ("fp32", "bf16", "fp16")],
)
@pytest.mark.thinned(5)
def test_batch_norms_of_all_kinds_are_kept_in_fp32_without_being_named(stage, size, precision):
    expected = in_plain_pytorch(Convnet, images, size, precision, batch_norms_in_fp32)
    assert_same(in_our_engine(Convnet, images, size, stage, precision), expected)


def test_a_batch_norm_alone_and_one_within_what_is_named_are_cast_once():
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


@pytest.mark.case(
    "models: What is built into a model",
    "Hooks that rename, add or drop keys of the state dict; extra state; tied weights; buffers that are not saved",
    "`engine.full_state_dict()` equals `model.state_dict()` of plain PyTorch, in fp32",
)
@EVERYWHERE
def test_the_full_state_dict_is_what_plain_pytorch_gives_with_hooks_extra_state_and_ties(stage, size, precision):
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


@pytest.mark.case(
    "models: What is built into a model",
    "`nn.TransformerEncoder` in evaluation, with padding",
    "zeros at the padded places, as in plain PyTorch; up to rounding, since torch's fused layers are off beside hooks",
)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
@EVERYWHERE
@pytest.mark.thinned(3)
def test_an_encoder_gives_zeros_at_padded_places_in_evaluation_as_in_plain_pytorch(stage, size, precision):
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
