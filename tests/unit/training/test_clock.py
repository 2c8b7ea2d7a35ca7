import math
import time

import pytest
import torch
from torch import nn

from zerotrain.models import GPT, MLP
from zerotrain.training.clock import NUM_WARMUP_STEPS, StepClock, count_flops, device_peak_flops

# The operations of a model, counted without computing them, and the share of the device's peak they take.


SEQ_LEN = 128
SEQUENCE = (torch.zeros(1, SEQ_LEN, dtype=torch.int64), torch.zeros(1, SEQ_LEN, dtype=torch.int64))
NUM_LAYERS, HIDDEN_SIZE = 4, 128


class Choosing(nn.Embedding):
    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return super().forward(ids).mean() * (ids.max().item() > 3)


def on_meta(make: type[nn.Module], **arguments: int) -> nn.Module:
    with torch.device("meta"):
        return make(**arguments)


def test_the_operations_of_a_gpt_are_those_of_the_palm_formula():
    model = on_meta(
        GPT, vocab_size=256, max_seq_len=SEQ_LEN, num_layers=NUM_LAYERS, num_heads=4, hidden_size=HIDDEN_SIZE
    )
    assert isinstance(model, GPT)
    num_weights = model.num_parameters - SEQ_LEN * HIDDEN_SIZE  # the positions are looked up, not multiplied with
    per_token = 6 * num_weights + 12 * NUM_LAYERS * HIDDEN_SIZE * SEQ_LEN
    assert count_flops(model, SEQUENCE) == pytest.approx(SEQ_LEN * per_token, rel=0.02)


def test_the_operations_of_a_model_without_attention_are_six_for_each_weight_of_a_product():
    model = on_meta(MLP, vocab_size=256, context=4, hidden_size=64, num_layers=2)
    num_weights = sum(module.weight.numel() for module in model.modules() if isinstance(module, nn.Linear))
    assert count_flops(model, SEQUENCE) == 6 * num_weights * SEQ_LEN


def test_a_forward_that_needs_values_has_no_count():
    assert count_flops(on_meta(Choosing, num_embeddings=8, embedding_dim=16), SEQUENCE) is None


def clock_of(durations_s: list[float], monkeypatch: pytest.MonkeyPatch) -> StepClock:
    """A clock that has timed steps of 100 tokens each."""
    now_s = 0.0
    monkeypatch.setattr(time, "perf_counter", lambda: now_s)
    clock = StepClock()
    for duration_s in durations_s:
        with clock:
            now_s += duration_s
        clock.count(100)
        now_s += 1000  # an evaluation, which is not training
    return clock


@pytest.mark.parametrize(
    ("durations_s", "last_steps", "tokens_per_s", "step_s"),
    [
        ([50.0] * NUM_WARMUP_STEPS + [1.0, 2.0, 9.0], None, 300 / 12, 2.0),
        ([50.0] * 10 + [1.0, 3.0], 2, 200 / 4, 2.0),
        ([2.0, 4.0], None, 200 / 6, 3.0),
    ],
    ids=["a run, without its first steps", "the last steps", "a run that is shorter"],
)
def test_the_speed_is_that_of_the_steps_that_count(durations_s, last_steps, tokens_per_s, step_s, monkeypatch):
    figures = clock_of(durations_s, monkeypatch).figures(last_steps)
    assert figures["tokens_per_s"] == figures["labels_per_s"] == pytest.approx(tokens_per_s)
    assert figures["steps_per_s"] == pytest.approx(tokens_per_s / 100)
    assert figures["step_ms_median"] == pytest.approx(1e3 * step_s)


def test_a_clock_goes_on_with_the_sums_of_one_before_it(monkeypatch):
    first = clock_of([50.0] * NUM_WARMUP_STEPS + [1.0, 2.0], monkeypatch)
    second = clock_of([40.0] * NUM_WARMUP_STEPS + [9.0], monkeypatch)
    second.load_state_dict(first.state_dict())
    third = StepClock()
    third.load_state_dict(second.state_dict())
    for clock in (second, third):
        assert clock.figures()["tokens_per_s"] == pytest.approx(300 / 12)
        assert clock.train_s == pytest.approx(90 * NUM_WARMUP_STEPS + 12)
    assert second.figures(1)["tokens_per_s"] == pytest.approx(100 / 9)


def test_labels_are_told_apart_from_tokens_also_where_a_run_goes_on():
    clock, again = StepClock(), StepClock()
    for _ in range(NUM_WARMUP_STEPS + 2):
        with clock:
            time.sleep(0.001)
        clock.count(100, num_labels=25)
    state = clock.state_dict()
    assert (state["tokens"], state["labels"]) == (200, 50)
    again.load_state_dict(state)
    for figures in (clock.figures(), again.figures()):
        assert figures["labels_per_s"] == pytest.approx(figures["tokens_per_s"] / 4)


def test_before_any_step_and_of_one_that_failed_there_is_no_speed():
    clock = StepClock()
    with pytest.raises(RuntimeError), clock:
        raise RuntimeError
    assert all(map(math.isnan, clock.figures().values()))


@pytest.mark.parametrize(
    ("device_name", "dtype", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", torch.bfloat16, 989.4e12),
        ("NVIDIA H100 PCIe", torch.bfloat16, 756.0e12),
        ("NVIDIA A100-SXM4-80GB", torch.float32, 19.5e12),
        ("NVIDIA A100-SXM4-80GB", torch.float64, None),
        ("NVIDIA L4", torch.bfloat16, 121e12),
        ("NVIDIA L40S", torch.bfloat16, 362e12),
        ("Some GPU of tomorrow", torch.bfloat16, None),
    ],
)
def test_the_peak_of_a_device_is_known_by_its_name_and_dtype(device_name, dtype, peak, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: device_name)
    assert device_peak_flops(torch.device("cuda", 0), dtype) == (None if peak is None else pytest.approx(peak))


def test_the_peak_of_fp32_is_that_of_tf32_where_matrices_are_multiplied_so(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100-SXM4-80GB")
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        assert device_peak_flops(torch.device("cuda", 0), torch.float32) == pytest.approx(156e12)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False


def test_the_peak_of_a_cpu_is_not_known():
    assert device_peak_flops(torch.device("cpu"), torch.float32) is None
