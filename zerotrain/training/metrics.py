"""What is measured along the way: throughput, and how much of the device it uses."""

import math
import statistics
import time
from types import TracebackType

import torch

NUM_WARMUP_STEPS = 3
"""First steps, which allocate and compile, left out of the run's speed where there are more."""

PEAK_TFLOPS = {
    # (16 bits with fp32 sums, fp32 without TF32) by a part of the device's name; the first part found counts, so
    # "H100 PCIe" comes before "H100". Dense peaks from NVIDIA's data sheets and, for RTX, its architecture whitepapers.
    "GB200": (2500.0, 80.0),
    "B200": (2250.0, 75.0),
    "H200 NVL": (835.5, 60.0),
    "H200": (989.4, 66.9),
    "H100 NVL": (835.5, 60.0),
    "H100 PCIe": (756.0, 51.2),
    "H100": (989.4, 66.9),
    "A100": (312.0, 19.5),
    "L40S": (362.0, 91.6),
    "L40": (181.0, 90.5),
    "L4": (121.0, 30.3),
    "RTX 5090": (209.5, 104.8),
    "RTX 4090": (165.2, 82.6),
    "RTX 3090": (71.0, 35.6),
}


def device_peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Floating point operations per second the device can do in `dtype`; None where that is not known."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return None
    device_name = torch.cuda.get_device_name(device)
    for name, (in_16_bits, in_32_bits) in PEAK_TFLOPS.items():
        if name in device_name:
            return 1e12 * (in_32_bits if dtype == torch.float32 else in_16_bits)
    return None


class StepClock:
    """Seconds and tokens of each training step. `with clock:` around a step, then `count` its tokens."""

    def __init__(self) -> None:
        self._durations_s: list[float] = []
        self._num_tokens: list[float] = []
        self._waits_s: list[float] = []
        self._started_s = 0.0

    def __enter__(self) -> "StepClock":
        self._started_s = time.perf_counter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self._durations_s.append(time.perf_counter() - self._started_s)

    def count(self, num_tokens: float, wait_s: float = 0.0) -> None:
        """Note the tokens of the step just timed, of all ranks together, and how long of it was waiting for data."""
        self._num_tokens.append(num_tokens)
        self._waits_s.append(wait_s)

    def tokens_per_s(self, last_steps: int | None = None) -> float:
        """Tokens per second over the last so many steps, or over the run without its first steps; nan before any."""
        return _ratio(*self._of(last_steps, self._num_tokens, self._durations_s))

    def steps_per_s(self, last_steps: int | None = None) -> float:
        """Steps per second, over the same steps as `tokens_per_s`; nan before any."""
        [durations_s] = self._of(last_steps, self._durations_s)
        return _ratio([1.0] * len(durations_s), durations_s)

    def step_ms_median(self, last_steps: int | None = None) -> float:
        """Median milliseconds of a step, over the same steps as `tokens_per_s`; nan before any."""
        [durations_s] = self._of(last_steps, self._durations_s)
        return 1e3 * statistics.median(durations_s) if durations_s else math.nan

    def data_wait_ms(self, last_steps: int | None = None) -> float:
        """Mean milliseconds that a step waited for its data, over the same steps; nan before any."""
        [waits_s] = self._of(last_steps, self._waits_s)
        return 1e3 * _ratio(waits_s, [1.0] * len(waits_s))

    def data_wait_share(self) -> float:
        """Part of the run's steps that was waiting for data, 0 to 1, over the same steps; nan before any."""
        return _ratio(*self._of(None, self._waits_s, self._durations_s))

    def _of(self, last_steps: int | None, *values: list[float]) -> list[list[float]]:
        """What belongs to the last so many steps, or to the run without its first steps."""
        first = _num_warmup_steps(len(self._durations_s)) if last_steps is None else -last_steps
        return [each[first:] for each in values]


def _ratio(amounts: list[float], per: list[float]) -> float:
    return sum(amounts) / sum(per) if per else math.nan


def _num_warmup_steps(num_steps: int) -> int:
    return NUM_WARMUP_STEPS if num_steps > NUM_WARMUP_STEPS else 0
