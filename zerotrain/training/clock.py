"""Measures training: throughput, and use of the device."""

import math
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from msgspec import Struct, convert, structs
from torch.utils.flop_counter import FlopCounterMode

from zerotrain.comm.ledger import Traffic
from zerotrain.data.fetch import as_inputs, to_device
from zerotrain.device.kinds import device_of

# MFU, a model's own arithmetic as a part of the devices' peak, as PaLM counts it (arXiv 2204.02311, app. B).


@dataclass(frozen=True)
class ModelFlops:
    """The numbers for MFU."""

    per_sequence: float
    """Floating point operations of the forward and backward of one sequence. Recomputation to save memory is not
    counted."""
    peak_per_s: float
    """Floating point operations per second of the devices of all ranks together."""

    def utilization(self, sequences_per_s: float) -> float:
        """MFU, from 0 to 1, at so many sequences per second over all ranks."""
        return sequences_per_s * self.per_sequence / self.peak_per_s


def count_flops(model: torch.nn.Module, batch: Any) -> int | None:
    """Count the floating point operations of the forward and backward of one micro-batch, without computing any.

    Args:
        model: on the meta device, as it was built: gives the mean loss of what is in the batch.
        batch: such as (ids (1, T), labels (1, T)).

    Returns:
        Those of matrix products, convolutions and attention; None where the forward needs values, which tensors on
        the meta device do not have.
    """
    inputs = as_inputs(to_device(batch, torch.device("meta")))
    with FlopCounterMode(display=False) as counter:
        try:
            (model(**inputs) if isinstance(inputs, Mapping) else model(*inputs)).backward()
        except RuntimeError:
            return None
    return counter.get_total_flops()


NUM_WARMUP_STEPS = 3
"""First steps, left out of the run's speed where there are more: they allocate and compile."""


class ClockState(Struct):
    """Sums over the steps of a run, as a checkpoint has them: the seconds of all steps, then of those that count."""

    train_s: float
    steps: float
    seconds: float
    tokens: float
    waits_s: float
    labels: float


_NOTHING = ClockState(*[0.0] * 6)


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
    """Floating point operations per second of the device in `dtype`; None: not known."""
    if dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return None
    device_name = device_of(device).name
    for name, (in_16_bits, in_32_bits) in PEAK_TFLOPS.items():
        if name in device_name:
            if dtype != torch.float32:
                return 1e12 * in_16_bits
            # TF32 runs on the units for 16 bits, at half their rate.
            return 1e12 * (in_16_bits / 2 if torch.backends.cuda.matmul.allow_tf32 else in_32_bits)
    return None


class TimedStep(NamedTuple):
    """The time of one step, and its amounts of all ranks together."""

    seconds: float
    tokens: float
    labels: float
    wait_s: float
    """Waiting for data."""
    comm_wait_s: float
    """Waiting of the host for other ranks."""
    update_s: float
    """Work of the host for the update."""


class StepClock:
    """Seconds, tokens and labels of each training step. `with clock:` around a step, then `count`.

    In a resumed run, earlier steps are there as sums alone: they count in means over the run, not in medians.
    """

    def __init__(self) -> None:
        self.last_s = 0.0
        """Seconds of the last step."""
        self.train_s = 0.0
        """Seconds of all steps of the run, the first ones too."""
        self._steps: list[TimedStep] = []
        self._started_s = 0.0
        self._earlier = _NOTHING

    def __enter__(self) -> "StepClock":
        self._started_s = time.perf_counter()
        return self

    def __exit__(self, *raised: object) -> None:
        self.last_s = time.perf_counter() - self._started_s

    def count(
        self,
        num_tokens: float,
        wait_s: float = 0.0,
        *,
        num_labels: float | None = None,
        traffic: Traffic = Traffic(),  # noqa: B008 -- never changed
    ) -> None:
        """Note the step just timed, its tokens of all ranks together, and how long of it was waiting for data.

        Args:
            num_labels: that count in the loss; None: as many as tokens.
            traffic: of the step.
        """
        labels = num_tokens if num_labels is None else num_labels
        self._steps.append(TimedStep(self.last_s, num_tokens, labels, wait_s, traffic.waited_s, traffic.update_s))
        self.train_s += self.last_s

    def state_dict(self) -> dict[str, float]:
        """The sums of the run's steps, for a checkpoint."""
        return structs.asdict(self._sums(self._counted_steps(), self._earlier))

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Go on from what `state_dict` gave."""
        self._earlier = convert(state, ClockState)
        self.train_s += self._earlier.train_s

    def figures(self, last_steps: int | None = None) -> dict[str, float]:
        """The speed over the last so many steps, or over the run without its first steps; nan before any.

        Returns:
            `tokens_per_s`, `labels_per_s` (labels that count in the loss) and `steps_per_s`; the mean `data_wait_ms` of
            a step, and `data_wait_share`, 0 to 1, of its time. These are of this sitting alone: `step_ms_median`, and
            the means `comm_wait_ms`, for which the host waited for other ranks, and `update_ms`.
        """
        steps = self._steps[-last_steps:] if last_steps else self._counted_steps()
        sums = self._sums(steps, _NOTHING if last_steps else self._earlier)
        count, seconds = sums.steps or math.nan, sums.seconds or math.nan
        return {
            "tokens_per_s": sums.tokens / seconds,
            "labels_per_s": sums.labels / seconds,
            "steps_per_s": sums.steps / seconds,
            "step_ms_median": 1e3 * statistics.median([step.seconds for step in steps] or [math.nan]),
            "data_wait_ms": 1e3 * sums.waits_s / count,
            "data_wait_share": sums.waits_s / seconds,
            "comm_wait_ms": 1e3 * statistics.fmean([step.comm_wait_s for step in steps] or [math.nan]),
            "update_ms": 1e3 * statistics.fmean([step.update_s for step in steps] or [math.nan]),
        }

    def _counted_steps(self) -> list[TimedStep]:
        """The steps of this sitting without its first ones, where there are more."""
        return self._steps[NUM_WARMUP_STEPS:] or self._steps

    def _sums(self, steps: list[TimedStep], earlier: ClockState) -> ClockState:
        """The sums over steps and over earlier ones."""
        return ClockState(
            train_s=self.train_s,
            steps=earlier.steps + len(steps),
            seconds=sum((step.seconds for step in steps), earlier.seconds),
            tokens=sum((step.tokens for step in steps), earlier.tokens),
            waits_s=sum((step.wait_s for step in steps), earlier.waits_s),
            labels=sum((step.labels for step in steps), earlier.labels),
        )
