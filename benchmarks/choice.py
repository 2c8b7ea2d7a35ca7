"""`python -m benchmarks.choice`: what `auto` chooses, beside a sweep of all that it could have chosen.

Two ranks train a GPT in fp32 through launch.py, in a memory cgroup that kills them beyond as much for each; with
`--link` on two hosts that a link joins, each with a cgroup of its own. For each limit each way is run, killed or not,
and then a run chooses for itself. The fastest ways and the chosen one run again, in turns. A row tells the fastest way
that lived, the way that was chosen, and the step of the chosen over that of the fastest, medians of their turns. Needs
root, for the cgroups.
"""

import argparse
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from benchmarks.errors import BenchmarkError
from benchmarks.network import LINKS_BIT_PER_S, SHARED, Network, link
from benchmarks.report import markdown
from benchmarks.rounds import REPOSITORY, free_port, machine
from zerotrain.config.words import word

NUM_RANKS = 2
CHOSEN = ("zero.stage", "model.activation_checkpointing", "offload.optimizer")
WAYS = [*product(range(4), (False, True), ("device", "disk"))]
CGROUPS = Path("/sys/fs/cgroup")
TIMEOUT_S = 600.0
GRACE_S = 20.0


@dataclass(frozen=True)
class Run:
    """What became of one."""

    step_ms: float | None
    """The median; None: a rank was killed or the run refused."""
    way: tuple[str, ...]
    """Its values of `CHOSEN`."""
    said: str


def settings_of(options: argparse.Namespace) -> list[str]:
    """The run, but for the way."""
    return [
        "data=synthetic",
        f"data.seq_len={options.seq_len}",
        "data.vocab_size=4096",
        f"train.micro_batch_size={options.rows}",
        "model=gpt_tiny",
        f"model.hidden_size={options.width}",
        f"model.num_layers={options.layers}",
        "model.num_heads=8",
        f"train.max_steps={options.steps}",
        "train.log_every=1",
        "train.eval_every=0",
        "train.eval_batches=1",
        "train.sample_tokens=0",
        "checkpoint.save_at_end=false",
        "launch.threads_per_rank=1",
    ]


@contextmanager
def memory_limit(name: str, nbytes: int) -> Iterator[Path]:
    """The `cgroup.procs` of a new group whose processes are killed beyond so many bytes; no swap.

    Raises:
        BenchmarkError: no group can be made.
    """
    is_first_version = (CGROUPS / "memory").is_dir()
    folder = (CGROUPS / "memory" if is_first_version else CGROUPS) / f"zerotrain-{os.getpid()}-{name}"
    try:
        folder.mkdir()
        (folder / ("memory.limit_in_bytes" if is_first_version else "memory.max")).write_text(str(nbytes))
    except OSError as error:
        raise BenchmarkError(f"memory cgroups: {error}; root is needed") from error
    try:
        yield folder / "cgroup.procs"
    finally:
        for _ in range(100):  # the last process may be on its way out
            try:
                folder.rmdir()
                break
            except OSError:
                time.sleep(0.05)


def run_ranks_of(settings: Sequence[str], network: Network, nbytes: int, folder: Path) -> Run:
    """Start the ranks, wait for them, and read the result."""
    run_dir, port = folder / "run", free_port()
    with ExitStack() as stack:
        ranks = []
        local = NUM_RANKS // len(network.hosts)
        groups = [
            stack.enter_context(memory_limit(str(number), local * nbytes)) for number in range(NUM_RANKS // local)
        ]
        for rank in range(NUM_RANKS):
            procs, host = groups[rank // local], network.host_of(rank, NUM_RANKS)
            environment = os.environ | {
                "RANK": str(rank),
                "WORLD_SIZE": str(NUM_RANKS),
                "LOCAL_RANK": str(rank % local),
                "LOCAL_WORLD_SIZE": str(local),
                "MASTER_ADDR": network.hosts[0].address,
                "MASTER_PORT": str(port),
                "OMP_NUM_THREADS": "1",
            }
            command = [*host.command_prefix, sys.executable, "launch.py", *settings, f"hydra.run.dir={run_dir}"]
            inside = ["sh", "-c", f'echo $$ > {procs}; exec "$@"', "sh", *command]
            log = stack.enter_context((folder / f"rank-{rank}.log").open("w"))
            ranks.append(subprocess.Popen(inside, cwd=REPOSITORY, env=environment, stdout=log, stderr=log))
        try:
            codes = _codes_of(ranks)
        finally:
            for process in ranks:
                process.kill()
                process.wait()
    said = (folder / "rank-0.log").read_text(errors="replace").strip()
    way = tuple(each.partition("=")[2] for each in settings[-len(CHOSEN) :])
    step_ms = None
    if codes == [0] * NUM_RANKS:
        step_ms = json.loads((run_dir / "result.json").read_text())["step_ms_median"]
        way = _chosen_in(run_dir) if "auto" in way else way
    shutil.rmtree(run_dir, ignore_errors=True)
    return Run(step_ms, way, said)


def _codes_of(ranks: Sequence[subprocess.Popen[bytes]]) -> list[int | None]:
    """The exit codes of all; None for a rank that still ran `GRACE_S` after another had failed.

    A rank that is killed before it has met the other leaves that one to wait for it as long as a start may take.

    Raises:
        BenchmarkError: they neither end nor fail.
    """
    deadline = time.monotonic() + TIMEOUT_S
    is_failed = False
    while time.monotonic() < deadline:
        codes = [process.poll() for process in ranks]
        if None not in codes:
            return codes
        if any(codes) and not is_failed:
            is_failed, deadline = True, min(deadline, time.monotonic() + GRACE_S)
        time.sleep(0.05)
    if not is_failed:
        raise BenchmarkError(f"the ranks have not ended after {TIMEOUT_S:.0f} s")
    return codes


def _chosen_in(run_dir: Path) -> tuple[str, ...]:
    chosen = json.loads((run_dir / "plan.json").read_text())["chosen"]
    return tuple(word(chosen[name]) for name in CHOSEN)


def named(way: Sequence[str]) -> str:
    """Such as `stage 1, recompute, optimizer on disk`."""
    stage, again, tier = way
    return f"stage {stage}" + ", recompute" * (again == "true") + f", optimizer on {tier}" * (tier != "device")


def compared(options: argparse.Namespace, network: Network, gb: float) -> list[str]:
    """A row: all ways under a limit, the choice, and then the fastest few beside it, `options.turns` times in turn."""
    given, nbytes = settings_of(options), int(gb * 1e9)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:

        def step_ms_of(way: tuple[str, ...]) -> float:
            """Infinity for one that is killed."""
            asked = [f"{name}={value}" for name, value in zip(CHOSEN, way, strict=True)]
            found = run_ranks_of([*given, *asked], network, nbytes, Path(folder)).step_ms
            print(f"{gb} GB: {named(way)}: {'killed' if found is None else f'{found:.0f} ms'}", flush=True)
            return math.inf if found is None else found

        swept = {way: step_ms_of(way) for way in (tuple(map(word, values)) for values in WAYS)}
        auto = [f"{name}=auto" for name in CHOSEN]
        found = run_ranks_of([*given, f"plan.memory_gb={gb}", *auto], network, nbytes, Path(folder))
        if found.step_ms is None:
            print(found.said[-2000:], flush=True)
        lived = sorted((way for way, ms in swept.items() if ms < math.inf), key=swept.__getitem__)
        chosen = [] if found.step_ms is None else [found.way]
        turns: dict[tuple[str, ...], list[float]] = {way: [] for way in [*lived[: options.fastest], *chosen]}
        for _ in range(options.turns):
            for way, each in turns.items():
                each.append(step_ms_of(way))
    medians = {way: statistics.median(each) for way, each in turns.items() if max(each, default=math.inf) < math.inf}
    return row_of(f"{gb:g}", f"{len(lived)} of {len(WAYS)}", medians, found)


def row_of(limit: str, num_lived: str, medians: dict[tuple[str, ...], float], found: Run) -> list[str]:
    """Cells.

    Args:
        medians: the step's milliseconds, by way, of those that lived in each of their turns.
        found: what `auto` chose.
    """
    best = min(medians, key=medians.__getitem__, default=None)
    row = [limit, num_lived, *((named(best), f"{medians[best]:.0f}") if best else ("none", ""))]
    if found.way in medians and best:
        row += [named(found.way), f"{medians[found.way]:.0f}", f"{medians[found.way] / medians[best]:.2f}"]
    else:
        row += ["refused or killed" if found.step_ms is None else f"{named(found.way)}, killed in a turn", "", ""]
    print(*row, sep=" | ", flush=True)
    return row


def options_of(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options of the command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.choice", description=__doc__)
    add = parser.add_argument
    add("--memory", default="2,0.85,0.6", help="GB that a rank may take, comma-separated")
    add("--link", choices=LINKS_BIT_PER_S, help="ranks on two hosts joined by a link of this rate; default: one host")
    add("--width", type=int, default=512)
    add("--layers", type=int, default=8)
    add("--rows", type=int, default=8)
    add("--seq-len", type=int, default=128)
    add("--steps", type=int, default=5)
    add("--fastest", type=int, default=4, help="so many of the fastest ways run again, beside the chosen one")
    add("--turns", type=int, default=3, help="so often, each in its turn")
    add("--folder", type=Path, default=None, help="on a disk; default: the folder of temporary files")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table: a row for each limit."""
    options = options_of(arguments)
    head = ["GB a rank", "ways that live", "fastest", "ms", "auto", "ms", "auto / fastest"]
    with link(options.link) if options.link else nullcontext(SHARED) as network:
        rows = [compared(options, network, float(gb)) for gb in options.memory.split(",")]
    print(f"\n{options.link or 'one host'}; {machine()}\n\n{markdown([head, *rows])}")


if __name__ == "__main__":
    main()
