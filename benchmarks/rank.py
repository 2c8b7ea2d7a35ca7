"""What one rank of a benchmark does: build an engine, train, and write down what it took, as often as `rounds.Ranks`
asks for it."""

import faulthandler
import json
import os
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.engines import ENGINES, Engine
from benchmarks.network import sent_nbytes
from benchmarks.split import Split, split_of
from benchmarks.workload import Workload
from zerotrain.comm.world import choose_device
from zerotrain.device.memory import set_heap
from zerotrain.device.processes import end_with_parent
from zerotrain.files.lock import whole
from zerotrain.training.clock import count_flops, device_peak_flops

NUM_HOST_STEPS = 5
MEASURE, REST = "measure", "rest"
"""What a rank can be asked for, each with the path of the file to write when it is done."""


@dataclass(frozen=True, kw_only=True)
class RankResult(Split):
    """What one rank measured. Times in ms, one for each timed step."""

    step_ms: list[float]
    loss: float
    """Of this rank's last step."""
    start_nbytes: int
    """Resident memory after the imports and the start of the process group: the interpreter's own."""
    peak_nbytes: int
    """Highest resident memory, the interpreter's included."""
    sent_nbytes: int | None
    """What left this rank's interface in all timed steps (of all ranks that share it)."""
    counted_nbytes: int | None
    """What the engine says this rank sent in its last step."""
    theory_nbytes: int | None
    """What theory says a rank sends in a step."""
    full_speed_ms: float | None
    """What the model's share of this rank would take at the device's peak FLOP/s, where that is known."""
    host_ms: float | None
    """CUDA: median time until a step returns to Python, with the device idle before."""
    device_peak_nbytes: int | None
    """CUDA: highest memory allocated from the first step on."""


class StepClock:
    """Marks on the time line of the device. The time between two marks is a step's, and none is lost between steps."""

    def __init__(self, device: torch.device) -> None:
        self._on_cuda = device.type == "cuda"
        self._events: list[torch.cuda.Event] = []
        self._times_s: list[float] = []

    def mark(self) -> None:
        """A step ends here, and the next one begins."""
        if self._on_cuda:
            self._events.append(torch.cuda.Event(enable_timing=True))
            self._events[-1].record()
        else:
            self._times_s.append(time.perf_counter())

    def durations_ms(self) -> list[float]:
        """Milliseconds between neighbouring marks."""
        if self._on_cuda:
            torch.cuda.synchronize()
            return [a.elapsed_time(b) for a, b in zip(self._events, self._events[1:], strict=False)]
        return [1e3 * (b - a) for a, b in zip(self._times_s, self._times_s[1:], strict=False)]


def own_device(workload: Workload) -> torch.device:
    """The device of this rank, made ready for it. Every engine gets the heap that ours sees to."""
    set_heap()
    device = choose_device(workload.device, int(os.environ.get("LOCAL_RANK", 0)))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    return device


class Prepared:
    """An engine that has made its first steps, as one rank of the process group there is."""

    def __init__(
        self, engine_name: str, workload: Workload, device: torch.device, interface: str | None = None
    ) -> None:
        self._workload, self._device, self._interface = workload, device, interface
        self._spec = ENGINES[engine_name]
        self._spec.load()
        dist.barrier()
        # The first optimizer of a process imports the half of torch that no engine can do without.
        torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])
        self._start_nbytes = resident_nbytes("VmRSS")
        model = workload.build_model(device)
        self._full_speed_ms = _full_speed_ms(workload, device)
        self._engine = self._spec.build(model, workload)
        num_steps = workload.num_warmup_steps + workload.num_steps
        self._batches = [workload.micro_batches(step, dist.get_rank(), device) for step in range(num_steps)]
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        self._warm_up()

    def rest(self) -> None:
        """Let others have the memory of the device that is free, until the next measurement, which warms up anew."""
        self._is_warm = False
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def measure(self) -> RankResult:
        """Train and return what it took."""
        engine, workload = self._engine, self._workload
        if not self._is_warm:
            self._warm_up()
        dist.barrier()
        sent_before = _sent_once_quiet(self._interface)
        clock = StepClock(self._device)
        clock.mark()
        for batch in self._batches[workload.num_warmup_steps :]:
            loss = engine.step(batch)
            clock.mark()
        step_ms = clock.durations_ms()
        sent_after = _sent_once_quiet(self._interface)
        traffic = engine.traffic()
        peak_nbytes = resident_nbytes("VmHWM")
        split, on_cuda = Split(), self._device.type == "cuda"
        if not on_cuda and not workload.compiled:
            split = split_of(lambda: engine.step(self._batches[-1]), has_ranges=self._spec.is_ours)
        return RankResult(
            **asdict(split),
            step_ms=step_ms,
            loss=loss.item(),
            start_nbytes=self._start_nbytes,
            peak_nbytes=peak_nbytes,
            sent_nbytes=None if sent_before is None or sent_after is None else sent_after - sent_before,
            counted_nbytes=traffic.counted_nbytes if traffic else None,
            theory_nbytes=traffic.theory_nbytes if traffic else None,
            full_speed_ms=self._full_speed_ms,
            host_ms=_host_ms(engine, self._batches[-1]) if on_cuda else None,
            device_peak_nbytes=torch.cuda.max_memory_allocated() if on_cuda else None,
        )

    def _warm_up(self) -> None:
        self._is_warm = True
        for batch in self._batches[: self._workload.num_warmup_steps]:
            self._engine.step(batch)


def resident_nbytes(field: str) -> int:
    """VmRSS (now) or VmHWM (highest so far) of this process. Not ru_maxrss, which a child inherits from its parent."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"/proc/self/status has no {field}")


def _sent_once_quiet(interface: str | None) -> int | None:
    """Bytes sent so far, read when nothing is under way any more: a collective may outlast the step that issued it."""
    if interface is None:
        return None
    before = -1
    while (now := sent_nbytes(interface)) != before:
        before = now
        time.sleep(0.1)
    return now


def _full_speed_ms(workload: Workload, device: torch.device) -> float | None:
    peak_per_s = device_peak_flops(device, torch.bfloat16 if workload.precision == "bf16" else torch.float32)
    if peak_per_s is None:
        return None
    ids, labels = workload.micro_batches(0, 0, torch.device("meta"))[0]
    num_flops = count_flops(workload.build_model(torch.device("meta")), (ids[:1], labels[:1]))
    num_sequences = workload.num_tokens / workload.num_ranks / workload.shape.seq_len
    return None if num_flops is None else 1e3 * num_flops * num_sequences / peak_per_s


def _host_ms(engine: Engine, batch: list[tuple[torch.Tensor, torch.Tensor]]) -> float:
    times_ms = []
    for _ in range(NUM_HOST_STEPS):
        torch.cuda.synchronize()
        start_s = time.perf_counter()
        engine.step(batch)
        times_ms.append(1e3 * (time.perf_counter() - start_s))
    return statistics.median(times_ms)


def main() -> None:
    """Read the job from the command line, measure, write the result."""
    end_with_parent()
    faulthandler.enable()
    job = json.loads(sys.argv[1])
    workload = Workload(**job["workload"])
    if ENGINES[job["engine"]].num_eager_steps is not None:
        # NCCL's watchdog asks events that a recording forbids to ask; registered buffers hang with expandable segments.
        os.environ |= {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "NCCL_GRAPH_REGISTER": "0"}
    device = own_device(workload)
    if job["others_are_fake"]:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=workload.num_ranks)
    else:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    prepared = Prepared(job["engine"], workload, device, job["interface"])
    for line in sys.stdin:  # as it is written, by `rounds.Ranks`
        wish, answer = line.rstrip("\n").split(" ", maxsplit=1)
        result = asdict(prepared.measure()) if wish == MEASURE else {}
        if wish == REST:
            prepared.rest()
        with whole(Path(answer)) as file:
            file.write(json.dumps(result).encode())
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
