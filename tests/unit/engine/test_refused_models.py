"""What users build into a model that would be trained otherwise than it says: refused at the build, with a sentence."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.parameter import is_lazy

import zerotrain
from tests.unit.engine.habits import SGD

pytestmark = [
    pytest.mark.case(
        "calls: Calls",
        "A model wrapped by another engine, scripted, with lazy layers or sparse embeddings",
        "refused at the build",
        of=("wrapped for several devices", "scripted", "without shapes", "sparse gradients"),
    ),
    pytest.mark.case(
        "calls: Calls",
        "`build_engine`, `set_stage`, `freeze`, `load` and the other calls between steps, `step` too, "
        "within `inference_mode` or `no_grad`",
        "same bits as outside; a model that was itself made in `inference_mode` is refused",
        of=("parameters made for inference",),
    ),
    pytest.mark.case(
        "models: What is built into a model",
        "`nn.Parameter(other.weight)`; a buffer or attribute that views a weight (`.data`, `.detach().T`, `[0]`)",
        "refused at the build, both named: assign the parameter itself to tie, or `clone()`",
        of=("two parameters that share memory", "a buffer over a weight", "an attribute over a weight"),
    ),
    pytest.mark.case(
        "models: What is built into a model",
        "`Embedding(max_norm=...)`, `EmbeddingBag` too",
        "refused at the build",
        of=("embedding that renormalises", "bag of such"),
    ),
    pytest.mark.case(
        "precision",
        "A model, or one parameter, in fp64",
        "refused at the build: call `model.float()`",
        of=("a whole model in fp64", "one parameter in fp64, frozen"),
    ),
]


def of_one_memory(change: Callable[[nn.Module], object]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        change(model)
        return model

    return make


def with_buffer(model: nn.Module, values: torch.Tensor) -> nn.Module:
    model.register_buffer("seen", values)
    return model


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "wrapped for several devices": (
        lambda: nn.DataParallel(nn.Linear(2, 2)),
        "the model is a DataParallel, which shares gradients over ranks itself; give build_engine the module in it",
    ),
    "scripted": (
        lambda: nn.Sequential(torch.jit.script(nn.Linear(2, 2))),
        "0 is a RecursiveScriptModule, whose code takes no hooks",
    ),
    "without shapes": (
        lambda: nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(3)),
        "1 is a LazyLinear without shapes yet; run one forward of the model before build_engine",
    ),
    "sparse gradients": (
        lambda: nn.Sequential(nn.Embedding(4, 2, sparse=True)),
        "0 is a Embedding with sparse=True, and buckets hold dense gradients; build it with sparse=False",
    ),
    "a whole model in fp64": (
        lambda: nn.Linear(2, 2).double(),
        r"^weight, bias are fp64, and the engine trains fp32 weights at most; call model\.float\(\) before ",
    ),
    "one parameter in fp64, frozen": (
        lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, bias=False).double().requires_grad_(False)),
        r"^1\.weight is fp64, ",
    ),
    "parameters made for inference": (
        torch.inference_mode()(lambda: nn.Linear(2, 2)),
        r"^weight of model Linear was made within torch\.inference_mode\(\), and can never be trained; build ",
    ),
    "a buffer made for inference": (
        lambda: with_buffer(nn.Linear(2, 2), torch.inference_mode()(torch.zeros)(2)),
        r"^seen of model Linear was made within torch\.inference_mode\(\)",
    ),
    "a sparse buffer": (
        lambda: with_buffer(nn.Linear(2, 2), torch.eye(2).to_sparse()),
        r"^seen is a tensor of layout sparse_coo, which ranks and checkpoints do not carry; keep it dense, ",
    ),
    "a sparse parameter": (
        lambda: nn.ParameterList([torch.ones(2), torch.eye(2).to_sparse()]),
        r"^1 is a tensor of layout sparse_coo, which ",
    ),
    "embedding that renormalises": (
        lambda: nn.Sequential(nn.Embedding(4, 2, max_norm=1.5)),
        r"^0 is a Embedding with max_norm=1\.5, which changes its weight in the forward by this rank's inputs only; ",
    ),
    "bag of such": (lambda: nn.EmbeddingBag(4, 2, max_norm=2), "^the model is a EmbeddingBag with max_norm=2, "),
    "two parameters that share memory": (
        of_one_memory(lambda m: setattr(m[1], "weight", nn.Parameter(m[0].weight))),
        r"^0\.weight and 1\.weight are two parameters that share memory, .*"
        r"assign the parameter itself \(model\.1\.weight = model\.0\.weight\)",
    ),
    "a buffer over a weight": (
        of_one_memory(lambda m: m.register_buffer("table", m[0].weight.detach().T)),
        r"^table is a tensor that shares memory with the parameter 0\.weight, and would keep its old values in "
        "training; ",
    ),
    "an attribute over a weight": (
        of_one_memory(lambda m: setattr(m[1], "first", [m[0].weight.data[0]])),
        r"^1\.first is a tensor that shares memory with the parameter 0\.weight",
    ),
    "a weight that was expanded": (
        lambda: nn.ParameterList([torch.ones(1, 3).expand(4, 3)]),
        r"^0 has several elements at one place, as expand\(\) gives them; clone\(\) it$",
    ),
}


ALSO_AS_A_FUNCTION = ("a whole model in fp64", "two parameters that share memory", "a buffer over a weight")


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_would_be_trained_otherwise_than_it_says_is_refused_and_left_as_it_was(name: str) -> None:
    make, answer = REFUSED[name]
    model = make()
    before = {key: value.clone() for key, value in model.state_dict().items() if not is_lazy(value)}
    functions = [(make, zerotrain.ZeroConfig(stage=3))] * (name in ALSO_AS_A_FUNCTION)  # looks at all live objects
    for given, zero in ((model, None), *functions):
        with pytest.raises(zerotrain.ConfigError, match=answer):
            zerotrain.build_engine(given, optimizer=SGD, zero=zero)
    after = model.state_dict()
    assert all(torch.equal(after[key].to_dense(), value.to_dense()) for key, value in before.items())
    assert {key: after[key].dtype for key in before} == {key: value.dtype for key, value in before.items()}


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


@pytest.mark.case(
    "models: What is built into a model",
    "Parameters that are disjoint parts of one memory (a flat checkpoint, cuDNN's weights), "
    "torch's old `spectral_norm` and `weight_norm`",
    "taken",
)
@pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated")
def test_parts_of_one_memory_and_tied_parameters_are_taken() -> None:
    makers = [flat_parts, tied, normalised, lambda: nn.LSTM(4, 4, num_layers=2)]
    for make in makers:
        zerotrain.build_engine(make(), optimizer=SGD)
    zerotrain.build_engine(
        lambda: nn.ModuleList(make() for make in makers), optimizer=SGD, zero=zerotrain.ZeroConfig(stage=3)
    )
