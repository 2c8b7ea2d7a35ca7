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
        self._started_s = 0.0

    def __enter__(self) -> "StepClock":
        self._started_s = time.perf_counter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self._durations_s.append(time.perf_counter() - self._started_s)

    def count(self, num_tokens: float) -> None:
        """Note the tokens of the step just timed, of all ranks together."""
        self._num_tokens.append(num_tokens)

    def tokens_per_s(self, last_steps: int | None = None) -> float:
        """Tokens per second over the last so many steps, or over the run without its first steps; nan before any."""
        first = _num_warmup_steps(len(self._durations_s)) if last_steps is None else -last_steps
        durations_s = self._durations_s[first:]
        num_tokens = sum(self._num_tokens[first:])
        return num_tokens / sum(durations_s) if durations_s else math.nan

    def steps_per_s(self, last_steps: int | None = None) -> float:
        """Steps per second, over the same steps as `tokens_per_s`; nan before any."""
        first = _num_warmup_steps(len(self._durations_s)) if last_steps is None else -last_steps
        durations_s = self._durations_s[first:]
        return len(durations_s) / sum(durations_s) if durations_s else math.nan

    def step_ms_median(self, last_steps: int | None = None) -> float:
        """Median milliseconds of a step, over the same steps as `tokens_per_s`; nan before any."""
        first = _num_warmup_steps(len(self._durations_s)) if last_steps is None else -last_steps
        durations_s = self._durations_s[first:]
        return 1e3 * statistics.median(durations_s) if durations_s else math.nan


def _num_warmup_steps(num_steps: int) -> int:
    return NUM_WARMUP_STEPS if num_steps > NUM_WARMUP_STEPS else 0
