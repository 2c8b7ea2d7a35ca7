import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from zerotrain.device.kinds import rehearsing
from zerotrain.models import GPT, MLP
from zerotrain.models.gpt import MeanCrossEntropy, chunked

SMALL = {"vocab_size": 256, "max_seq_len": 32, "num_layers": 2, "num_heads": 4, "hidden_size": 64}
SMALL_MLP = {"vocab_size": 50, "context": 3, "hidden_size": 32, "num_layers": 2}


@pytest.fixture
def model() -> GPT:
    torch.manual_seed(0)
    return GPT(**SMALL)


def random_tokens(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(SMALL["vocab_size"], shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("num_layers", "num_heads", "hidden_size", "num_parameters"),
    [(12, 12, 768, 124_439_808), (24, 16, 1024, 354_823_168), (36, 20, 1280, 774_030_080)],
    ids=["gpt2", "gpt2_medium", "gpt2_large"],
)
def test_the_parameter_counts_are_those_of_gpt2(num_layers, num_heads, hidden_size, num_parameters):
    with torch.device("meta"):
        model = GPT(
            vocab_size=50257, max_seq_len=1024, num_layers=num_layers, num_heads=num_heads, hidden_size=hidden_size
        )
    assert model.num_parameters == num_parameters
    assert sum(parameter.numel() for parameter in model.parameters()) == num_parameters


def reference_logits(model: GPT, ids: torch.Tensor) -> torch.Tensor:
    """GPT-2's forward in plain arithmetic: explicit mask, softmax and tanh."""
    seq_len = ids.shape[1]
    hidden = model.wte.weight[ids] + model.wpe.weight[:seq_len]
    future = torch.ones(seq_len, seq_len, dtype=torch.bool).triu(1)
    for block in model.blocks:
        attention = block.attention
        normed = F.layer_norm(hidden, hidden.shape[-1:], block.ln_1.weight, block.ln_1.bias)
        parts = (normed @ attention.qkv_proj.weight.T + attention.qkv_proj.bias).split(hidden.shape[-1], dim=-1)
        heads = []
        for query, key, value in zip(*(part.split(hidden.shape[-1] // 4, dim=-1) for part in parts), strict=True):
            scores = query @ key.mT / math.sqrt(query.shape[-1])
            heads.append(scores.masked_fill(future, -math.inf).softmax(-1) @ value)
        hidden = hidden + torch.cat(heads, -1) @ attention.out_proj.weight.T + attention.out_proj.bias
        normed = F.layer_norm(hidden, hidden.shape[-1:], block.ln_2.weight, block.ln_2.bias)
        inner = normed @ block.mlp.in_proj.weight.T + block.mlp.in_proj.bias
        inner = 0.5 * inner * (1 + torch.tanh(math.sqrt(2 / math.pi) * (inner + 0.044715 * inner**3)))
        hidden = hidden + inner @ block.mlp.out_proj.weight.T + block.mlp.out_proj.bias
    return F.layer_norm(hidden, hidden.shape[-1:], model.ln_f.weight, model.ln_f.bias) @ model.wte.weight.T


def test_the_logits_are_those_of_gpt2_written_out(model):
    nn.init.normal_(model.blocks[0].attention.out_proj.bias)  # biases start at zero, which would hide a missing one
    ids = random_tokens(2, 32)
    torch.testing.assert_close(model(ids), reference_logits(model, ids), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("built", [lambda: GPT(**SMALL), lambda: MLP(**SMALL_MLP)], ids=["GPT", "MLP"])
def test_the_loss_is_the_mean_over_the_labels_that_count(built):
    torch.manual_seed(0)
    model = built()
    ids, labels = (random_tokens(3, 16, seed=seed) % SMALL_MLP["vocab_size"] for seed in (1, 2))
    labels[0, 5:] = -100
    log_probabilities = model(ids).log_softmax(-1)
    counted = [-log_probabilities[b, t, labels[b, t]] for b in range(3) for t in range(16) if labels[b, t] != -100]
    torch.testing.assert_close(model(ids, labels), torch.stack(counted).mean())


RAGGED = SMALL | {"vocab_size": 259}
NUM_LABELS = 37
HEADS = [{"vocab_multiple": 64}, {"loss_chunks": 5}, {"vocab_multiple": 64, "loss_chunks": 48}]
"""259 tokens are no multiple of 64, and 5 divides no number of positions here. With 48 there is one in each chunk, and
their gradients do not add up in 16 bits."""


def loss_and_gradients(dtype, factor=1.0, *, with_outputs=False, **head):
    """The loss of a model with 259 tokens, and by name the gradients of `factor` times that loss."""
    torch.manual_seed(0)
    model = GPT(**RAGGED, **head).to(dtype)
    ids, labels = random_tokens(3, 16), random_tokens(3, 16, seed=2)
    labels[0, 5:] = -100
    loss = model(ids, labels, with_outputs=with_outputs)
    loss = loss[0] if with_outputs else loss
    (factor * loss).backward()
    return {"loss": loss.detach()} | {name: each.grad for name, each in model.named_parameters()}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head", HEADS, ids=str)
def test_no_kind_of_head_has_a_gradient_that_is_further_from_the_true_one(head: dict[str, int], dtype: torch.dtype):
    """In 16 bits it errs as much as PyTorch's and is as long: the scale of a loss must not be rounded to 16 bits."""
    factor = NUM_LABELS * (1 + 2**-8 + 2**-11) * (256 if dtype == torch.float16 else 1)
    true, plain = loss_and_gradients(torch.float64, factor), loss_and_gradients(dtype, factor)
    found = loss_and_gradients(dtype, factor, **head)
    assert found["loss"].dtype == plain["loss"].dtype == torch.float32
    torch.testing.assert_close(found["loss"], plain["loss"], rtol=1e-6, atol=0)
    assert all(found[name].dtype == plain[name].dtype for name in plain)
    for names in (["wte.weight"], [name for name in true if name != "wte.weight"]):
        wanted, *others = (
            torch.cat([each[name].double().flatten() for name in names]) for each in (true, plain, found)
        )
        off = [(each - wanted).norm() / wanted.norm() for each in others]
        assert off[1] <= 1.1 * off[0] + 1e-6, names
        lengths = [each @ wanted / (wanted @ wanted) for each in others]
        torch.testing.assert_close(lengths[1], lengths[0], rtol=0, atol=max(1e-6, torch.finfo(dtype).eps / 4))


@pytest.mark.parametrize("head", HEADS, ids=str)
def test_no_kind_of_head_changes_what_is_kept_or_given(head: dict[str, int]):
    torch.manual_seed(0)
    plain = GPT(**RAGGED)
    torch.manual_seed(0)
    model = GPT(**RAGGED, **head)
    kept = model.state_dict()
    assert list(kept) == list(plain.state_dict())
    assert all(torch.equal(kept[name], each) for name, each in plain.state_dict().items())
    ids, labels = random_tokens(2, 8), random_tokens(2, 8, seed=2)
    logits = plain(ids)
    torch.testing.assert_close(model(ids), logits)
    torch.testing.assert_close(model(ids, labels, with_outputs=True), (plain(ids, labels), logits.detach()))
    with torch.no_grad():
        torch.testing.assert_close(model(ids, labels), plain(ids, labels))


@pytest.mark.parametrize("head", [{}, *HEADS], ids=str)
def test_labels_that_are_all_ignored_give_no_loss_and_no_gradient(head: dict[str, int]):
    model = GPT(**RAGGED, **head)
    loss = model(random_tokens(2, 8), torch.full((2, 8), -100))
    loss.backward()
    assert loss.item() == 0
    assert all(not parameter.grad.any() for parameter in model.parameters())


@pytest.mark.parametrize("head", [{}, *HEADS], ids=str)
def test_outputs_beside_the_loss_change_no_bit_of_any_gradient(head: dict[str, int]):
    alone, beside = (loss_and_gradients(torch.float32, with_outputs=each, **head) for each in (False, True))
    assert all(torch.equal(alone[name], beside[name]) for name in alone)


def test_chunks_in_which_many_positions_agree_do_not_overflow_fp16():
    """40,000 positions a chunk, each of which pulls in the same direction."""
    hidden = (torch.randn(1, 80_000, 8, generator=torch.Generator().manual_seed(0)) + 2).half().requires_grad_()
    weight, labels = torch.randn(16, 8).half().requires_grad_(), torch.zeros(1, 80_000, dtype=torch.int64)
    wanted = torch.autograd.grad(64 * MeanCrossEntropy()(F.linear(hidden, weight), labels), (hidden, weight))
    for factor in (64.0, 1.0):
        found = torch.autograd.grad(
            factor * chunked(MeanCrossEntropy(), 2, hidden, weight, None, labels), (hidden, weight)
        )
        for mine, theirs in zip(found, wanted, strict=True):
            torch.testing.assert_close(mine * (64 / factor), theirs, rtol=0.01, atol=0.01 * theirs.abs().max().item())


@pytest.mark.parametrize(
    ("heads", "same"),
    [
        ([{"vocab_multiple": multiple} for multiple in (64, 256, 512, 1000)], False),
        ([{"loss_chunks": 5}], False),
        ([{"vocab_multiple": 64, "loss_chunks": 48}], False),
        ([{"vocab_multiple": 7}], True),
    ],
    ids=["padded", "chunks", "padded chunks", "no row more"],
)
def test_a_head_of_another_kind_has_other_bits(heads, same):
    """It depends on the machine at which sizes a padded product has other bits: one of a few has them."""
    plain, *others = (loss_and_gradients(torch.float32, **head) for head in ({}, *heads))
    assert all(torch.equal(plain[name], found[name]) for found in others for name in plain) is same


def test_by_itself_the_head_is_padded_on_a_gpu_alone_and_saves_the_same_shapes():
    plain, found = (loss_and_gradients(torch.float32, vocab_multiple=multiple) for multiple in (1, "auto"))
    assert all(torch.equal(plain[name], found[name]) for name in plain)
    with torch.device("meta"):  # as a plan rehearses it
        model, ids = GPT(**RAGGED), torch.zeros(2, 16, dtype=torch.int64)
    for on_host, num_logits in ((True, 259), (False, 320)):
        with rehearsing(on_host=on_host), Largest() as largest:
            model(ids, ids)
        assert largest.numel == max(2 * 16 * num_logits, num_logits * 64)
    assert model.state_dict()["wte.weight"].shape == (259, 64)


class Largest(TorchDispatchMode):
    """Notes the elements of the largest tensor that an operation gives."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = func(*args, **(kwargs or {}))
        for each in given if isinstance(given, tuple | list) else [given]:
            self.numel = max(self.numel, each.numel() if isinstance(each, torch.Tensor) else 0)
        return given


def test_a_loss_in_chunks_has_the_logits_of_one_at_a_time():
    ids, labels = random_tokens(32, 32), random_tokens(32, 32, seed=2)  # 1,024 positions
    largest = []
    for num_chunks in (1, 8):
        model = GPT(**SMALL | {"vocab_size": 4096}, loss_chunks=num_chunks)
        with Largest() as seen:
            model(ids, labels).backward()
        largest.append(seen.numel)
    assert largest == [1024 * 4096, 4096 * 128]


def test_a_position_sees_nothing_that_comes_after_it(model):
    ids = random_tokens(1, 16)
    changed = ids.clone()
    changed[0, 10:] = (changed[0, 10:] + 1) % 256
    before, after = model(ids), model(changed)
    assert torch.equal(before[:, :10], after[:, :10])
    assert not torch.equal(before[:, 10], after[:, 10])


def test_parameters_are_defined_in_the_order_in_which_forward_uses_them(model):
    used = []
    for name, module in model.named_modules():
        if next(module.parameters(recurse=False), None) is not None:
            module.register_forward_pre_hook(lambda module, inputs, name=name: used.append(name))
    model(random_tokens(1, 4))
    defined = list(dict.fromkeys(name.rpartition(".")[0] for name, _ in model.named_parameters()))
    assert defined == used


def test_projections_into_the_residual_stream_start_smaller(model):
    for name, weight in model.named_parameters():
        if name.endswith("_proj.weight"):
            std = 0.02 / math.sqrt(2 * 2) if "out_proj" in name else 0.02
            assert weight.std().item() == pytest.approx(std, rel=0.05), name


def test_dropout_acts_in_training_only():
    model = GPT(**SMALL, dropout=0.5)
    ids = random_tokens(1, 8)
    assert not torch.equal(model(ids), model(ids))
    model.eval()
    assert torch.equal(model(ids), model(ids))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("num_heads", 3, r"model.num_heads=3 does not divide model.hidden_size=64; .* such as 4"),
        ("num_heads", 0, "model.num_heads=0 is too small; it must be at least 1"),
        ("vocab_multiple", 0, "model.vocab_multiple=0 is too small; it must be at least 1"),
        ("vocab_multiple", "64s", "model.vocab_multiple=64s is no whole number"),
        ("loss_chunks", 0, "model.loss_chunks=0 is too small; it must be at least 1"),
        ("dropout", 1.0, "model.dropout=1.0 is out of range; it must be at least 0 and below 1"),
    ],
)
def test_a_wrong_argument_is_refused_by_name(name, value, message):
    with pytest.raises(ValueError, match=message):
        GPT(**SMALL | {name: value})


@pytest.mark.parametrize("name", SMALL_MLP)
def test_a_wrong_argument_of_the_mlp_is_refused_by_name(name):
    with pytest.raises(ValueError, match=f"model.{name}=0 is too small; it must be at least 1"):
        MLP(**SMALL_MLP | {name: 0})


def test_a_sequence_longer_than_the_positions_is_refused(model):
    with pytest.raises(ValueError, match=r"33 tokens is longer than model.max_seq_len=32"):
        model(random_tokens(1, 33))


def test_a_prediction_depends_on_the_last_context_tokens_alone():
    mlp, ids = MLP(**SMALL_MLP), random_tokens(1, 10) % 50
    before = mlp(ids)
    for position in range(10):
        changed = ids.clone()
        changed[0, position] = (changed[0, position] + 1) % 50
        differs = (mlp(changed) != before).any(dim=-1)[0].tolist()
        assert differs == [position <= t < position + 3 for t in range(10)]
