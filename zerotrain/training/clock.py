"""Measures training: throughput, and use of the device."""

import math
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from zerotrain.comm.ledger import Traffic
from zerotrain.data.fetch import as_inputs, to_device
from zerotrain.device.kinds import device_of

# Part of the devices' peak that a model's own arithmetic takes: MFU as PaLM counts it (arXiv 2204.02311, app. B).


@dataclass(frozen=True)
class ModelFlops:
    """The numbers from which MFU is computed."""

    per_sequence: float
    """Floating point operations of the forward and backward of one sequence. Recomputation to save memory is not
    counted."""
    peak_per_s: float
    """Floating point operations per second that the devices of all ranks can do together."""

    def utilization(self, sequences_per_s: float) -> float:
        """MFU, from 0 to 1, at so many sequences per second over all ranks."""
        return sequences_per_s * self.per_sequence / self.peak_per_s


def count_flops(model: nn.Module, batch: Any) -> int | None:
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
"""First steps, which allocate and compile, left out of the run's speed where there are more."""

EARLIER = ("train_s", "steps", "seconds", "tokens", "waits_s", "labels")
"""Sums of earlier steps in a clock: the seconds of all, then sums over those that count. The last is not in what an
earlier zerotrain has saved, which counted labels as tokens."""

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


class StepClock:
    """Seconds, tokens and labels of each training step. `with clock:` around a step, then `count`.

    In a resumed run, earlier steps are there as sums alone: they count in means over the run, not in medians.
    """

    def __init__(self) -> None:
        self._durations_s: list[float] = []
        self._num_tokens: list[float] = []
        self._num_labels: list[float] = []
        self._waits_s: list[float] = []
        self._comm_waits_s: list[float] = []
        self._updates_s: list[float] = []
        self._started_s = 0.0
        self._earlier = dict.fromkeys(EARLIER, 0.0)

    def __enter__(self) -> "StepClock":
        self._started_s = time.perf_counter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self._durations_s.append(time.perf_counter() - self._started_s)

    def count(
        self,
        num_tokens: float,
        wait_s: float = 0.0,
        *,
        num_labels: float | None = None,
        traffic: Traffic = Traffic(),  # noqa: B008 -- never changed
    ) -> None:
        """Note the tokens of the step just timed, of all ranks together, and how long of it was waiting for data.

        Args:
            num_labels: that count in the loss; None: as many as tokens.
            traffic: of the step.
        """
        self._num_tokens.append(num_tokens)
        self._num_labels.append(num_tokens if num_labels is None else num_labels)
        self._waits_s.append(wait_s)
        self._comm_waits_s.append(traffic.waited_s)
        self._updates_s.append(traffic.update_s)

    def state_dict(self) -> dict[str, float]:
        """The sums of the run's steps, for a run that resumes."""
        counted = self._select(None, self._durations_s, self._num_tokens, self._waits_s, self._num_labels)
        values = (self.train_s, float(len(counted[0])), *map(sum, counted))  # in the order of `EARLIER`
        earlier = {"train_s": 0.0} | {name: self._earlier[name] for name in EARLIER[1:]}
        return {name: earlier[name] + value for name, value in zip(EARLIER, values, strict=True)}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Go on from what `state_dict` gave."""
        self._earlier = {name: float(state[name]) for name in EARLIER[:-1]}
        self._earlier["labels"] = float(state.get("labels", state["tokens"]))

    @property
    def last_s(self) -> float:
        """Seconds of the last step."""
        return self._durations_s[-1]

    @property
    def train_s(self) -> float:
        """Seconds of all steps of the run, the first ones too."""
        return self._earlier["train_s"] + sum(self._durations_s)

    def tokens_per_s(self, last_steps: int | None = None) -> float:
        """Tokens per second over the last so many steps, or over the run without its first steps; nan before any."""
        return self._mean("tokens", self._num_tokens, "seconds", self._durations_s, last_steps)

    def labels_per_s(self, last_steps: int | None = None) -> float:
        """Labels that count in the loss per second, over the same steps as `tokens_per_s`; nan before any."""
        return self._mean("labels", self._num_labels, "seconds", self._durations_s, last_steps)

    def steps_per_s(self, last_steps: int | None = None) -> float:
        """Steps per second, over the same steps as `tokens_per_s`; nan before any."""
        return self._mean("steps", [1.0] * len(self._durations_s), "seconds", self._durations_s, last_steps)

    def step_ms_median(self, last_steps: int | None = None) -> float:
        """Median milliseconds of a step, over the same steps as `tokens_per_s`, but of this sitting; nan before any."""
        [durations_s] = self._select(last_steps, self._durations_s)
        return 1e3 * statistics.median(durations_s) if durations_s else math.nan

    def data_wait_ms(self, last_steps: int | None = None) -> float:
        """Mean milliseconds that a step waited for its data, over the same steps; nan before any."""
        return 1e3 * self._mean("waits_s", self._waits_s, "steps", [1.0] * len(self._waits_s), last_steps)

    def comm_wait_ms(self, last_steps: int | None = None) -> float:
        """Mean milliseconds that the host waited for other ranks in a step, over the same steps but of this sitting;
        nan before any."""
        return 1e3 * _mean_of(*self._select(last_steps, self._comm_waits_s))

    def update_ms(self, last_steps: int | None = None) -> float:
        """Mean milliseconds of the host for the update of a step, likewise."""
        return 1e3 * _mean_of(*self._select(last_steps, self._updates_s))

    def data_wait_share(self) -> float:
        """Part of the run's steps that was waiting for data, 0 to 1, over the same steps; nan before any."""
        return self._mean("waits_s", self._waits_s, "seconds", self._durations_s, None)

    def _mean(self, amount: str, amounts: list[float], unit: str, units: list[float], last_steps: int | None) -> float:
        """Amounts per unit, of the last so many steps or of the run; their names are those of the earlier sums."""
        of_amounts, of_units = map(sum, self._select(last_steps, amounts, units))
        if last_steps is None:
            of_amounts, of_units = of_amounts + self._earlier[amount], of_units + self._earlier[unit]
        return of_amounts / of_units if of_units else math.nan

    def _select(self, last_steps: int | None, *values: list[float]) -> list[list[float]]:
        """The entries of the last so many steps, or of this sitting without its first steps."""
        num_warmup = NUM_WARMUP_STEPS if len(self._durations_s) > NUM_WARMUP_STEPS else 0
        start = num_warmup if last_steps is None else -last_steps
        return [entries[start:] for entries in values]


def _mean_of(values: list[float]) -> float:
    return statistics.fmean(values) if values else math.nan
