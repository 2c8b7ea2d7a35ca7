"""One rank on a GPU: the same code as on the CPU, which these tests run too where they can, so that they stay true.

`make test-gpu` runs those for a GPU; nothing but torch and pytest is needed to start them.
"""

import warnings

import pytest
import torch
from cases import Case, batch, build, make_model, micro_batches, reference_weights, train

from zerotrain.config.schema import ZeroConfig

ON_GPU = pytest.param("cuda", marks=pytest.mark.gpu)


@pytest.fixture(autouse=True)
def engine_is_there() -> None:
    """Skips each test, not the file: pytest takes a file without tests for a mistake and ends with exit code 5."""
    pytest.importorskip("zerotrain.factory")


@pytest.mark.parametrize("device", ["cpu", ON_GPU])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_one_rank_trains_as_plain_pytorch_on_the_same_device(precision: str, device: str) -> None:
    """On a GPU to a tolerance: the backward of an embedding adds in no fixed order there."""
    case = Case(ZeroConfig(stage=3), precision=precision, num_micro_batches=2)
    expected = reference_weights(case, 1, device)
    got = train(case, device).full_state_dict()
    atol = {"cpu": 0.0, "cuda": 1e-5 if precision == "fp32" else 2e-2}[device]
    for name, weight in expected.items():
        torch.testing.assert_close(got[name], weight.cpu(), rtol=0, atol=atol)


@pytest.mark.gpu
@pytest.mark.parametrize("max_grad_norm", [None, 1.0])
def test_the_host_waits_for_the_device_once_in_a_step(max_grad_norm: float | None) -> None:
    """It has to know whether the update is skipped."""
    case = Case(ZeroConfig(stage=2), max_grad_norm=max_grad_norm)
    engine = build(case, make_model().to("cuda"))
    inputs = micro_batches(batch(0, 1, 2).to("cuda"), 0)
    engine.train_step(inputs)
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            engine.train_step(inputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len([each for each in caught if "synchroniz" in str(each.message)]) == 1
