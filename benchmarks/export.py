"""`python -m benchmarks.export --folder FOLDER`: what is trained, as files of others, beside the peers' own tools.

Two ranks train a GPT one step by AdamW in fp32 at stage 3, with our engine, by FSDP2 and by DeepSpeed, and each saves
a checkpoint. Then each tool runs as its documentation has it, as a command of its own, one process:

* ours: `zerotrain export`, which verifies what it reads and waits for the disk;
* DCP: `python -m torch.distributed.checkpoint.format_utils dcp_to_torch`, of a folder with the weights alone and of one
  with the optimizer's state too;
* DeepSpeed: the `zero_to_fp32.py` that it puts beside its checkpoint, with `--safe_serialization`;
* "bare copy" reads as many bytes as the weights have, and writes them, in pieces of 1 MiB.

No file is in the page cache when a command starts, and the clock stops when all it wrote is on the disk. Peak is the
most that was resident (VmHWM), pages of mapped files among it; its imports are what it needs with --help.
Rounds are interleaved: each way once, in turning order. What comes out must be the same weights, within 1e-4.
"""

import argparse
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch

from benchmarks.errors import BenchmarkError
from benchmarks.export_saved import DCP, DEEPSPEED, OURS, WEIGHTS, save
from benchmarks.report import markdown
from benchmarks.rounds import machine
from benchmarks.workload import SIZES, Workload
from tests.ranks.processes import run_ranks

BARE = "bare copy"
TOLERANCE = 1e-4
COPY = """
import argparse, os
parser = argparse.ArgumentParser(); parser.add_argument("source"); parser.add_argument("target")
given = parser.parse_args(); source, target = open(given.source, "rb", 0), open(given.target, "wb", 0)
piece = bytearray(2**20)
while count := source.readinto(piece): target.write(memoryview(piece)[:count])
"""


@dataclass(frozen=True)
class Way:
    """A command: {saved} and {out} stand for what it reads and makes."""

    command: list[str]
    saved: str
    """Which folder of the checkpoints it reads."""

    @property
    def program(self) -> tuple[str, ...]:
        """What decides about its imports."""
        return tuple(self.command[:3])

    def filled(self, saved: Path, out: Path) -> list[str]:
        """The command for two paths."""
        return [each.replace("{saved}", str(saved)).replace("{out}", str(out)) for each in self.command]


@dataclass(frozen=True)
class Found:
    """Of one run."""

    wall_s: float
    cpu_s: float
    peak_nbytes: int
    nbytes: int
    """Of all that it wrote."""


EXPORT = [sys.executable, "-m", "zerotrain", "export", "{saved}", "--out", "{out}"]
DCP_TO_TORCH = [sys.executable, "-m", "torch.distributed.checkpoint.format_utils"]
WAYS = {
    BARE: Way([sys.executable, "-c", COPY, "{saved}", "{out}"], "bare"),
    "ours, weights": Way(EXPORT, OURS),
    "DeepSpeed zero_to_fp32, weights": Way(
        [sys.executable, "{saved}/zero_to_fp32.py", "{saved}", "{out}", "--safe_serialization"], DEEPSPEED
    ),
    "DCP format_utils, weights": Way([*DCP_TO_TORCH, "dcp_to_torch", "{saved}", "{out}"], WEIGHTS),
    "ours, weights and optimizer": Way([*EXPORT, "--optimizer"], OURS),
    "DCP format_utils, weights and optimizer": Way([*DCP_TO_TORCH, "dcp_to_torch", "{saved}", "{out}"], DCP),
    "ours, into a folder of DCP": Way([*EXPORT, "--dcp"], OURS),
}
COMPARED = [name for name in WAYS if name != BARE]


def run(way: Way, folder: Path) -> Found:
    """Run a command with none of its files in memory, and wait until what it wrote is on the disk."""
    saved, out = folder / way.saved, folder / "out"
    _forget(saved)
    started_s = time.perf_counter()
    cpu_s, peak_nbytes = _run(way.filled(saved, out))
    files = _files(out)
    for file in files:
        _sync(file)
    wall_s = time.perf_counter() - started_s
    return Found(wall_s, cpu_s, peak_nbytes, sum(file.stat().st_size for file in files))


def _run(command: list[str]) -> tuple[float, int]:
    """CPU seconds and the most that was resident.

    Raises:
        BenchmarkError: it failed; with what it said.
    """
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(command, stdout=said, stderr=said)
        status, used, peak_nbytes = 0, None, 0
        while used is None:  # of the peak that wait4 tells the parent's is a part
            with suppress(ProcessLookupError):
                found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{process.pid}/status").read_text())
                peak_nbytes = max(peak_nbytes, int(found[1]) * 1024 if found else 0)
            time.sleep(0.002)
            ended, status, so_far = os.wait4(process.pid, os.WNOHANG)
            used = so_far if ended else None
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode != 0:
            said.seek(0)
            raise BenchmarkError(f"{' '.join(command)} ended with {process.returncode}:\n{said.read()}")
    return used.ru_utime + used.ru_stime, peak_nbytes


def imports_nbytes(way: Way, folder: Path) -> int:
    """Resident at most where the command does nothing."""
    return _run([*way.filled(folder / way.saved, folder / "out"), "--help"])[1]


def weights_in(out: Path) -> dict[str, torch.Tensor]:
    """What a command made, by the names of the model."""
    if out.is_file():
        found: dict[str, torch.Tensor] = torch.load(out, mmap=True, weights_only=True)["model"]
        return found
    from safetensors.torch import load_file

    return {name: values for file in sorted(out.glob("*.safetensors")) for name, values in load_file(file).items()}


def require_equal(name: str, found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    """Make sure that a tool lost nothing. The trainings agree to rounding, no more.

    Raises:
        BenchmarkError: names or numbers are others.
    """
    if found.keys() != wanted.keys():
        raise BenchmarkError(f"{name}: has other names: {sorted(found.keys() ^ wanted.keys())[:3]}")
    for each, values in wanted.items():
        if not torch.allclose(found[each].float(), values, rtol=0, atol=TOLERANCE):
            raise BenchmarkError(f"{name}: {each} has other values")


def _files(path: Path) -> list[Path]:
    return [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]


def _sync(file: Path) -> None:
    descriptor = os.open(file, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def _forget(path: Path) -> None:
    """Let the page cache forget files: those that are on the disk."""
    for file in _files(path):
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def _remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def table(found: dict[str, list[Found]], imports: dict[str, int]) -> list[list[str]]:
    """A row for each way."""
    rows = [["", "s", "MB written", "CPU s", "peak MB", "above its imports"]]
    for name, rounds in found.items():
        times = [each.wall_s for each in rounds]
        peak = statistics.median(each.peak_nbytes for each in rounds)
        rows.append(
            [
                name,
                f"{statistics.median(times):.2f} ({min(times):.2f} to {max(times):.2f})",
                f"{rounds[0].nbytes / 1e6:.0f}",
                f"{statistics.median(each.cpu_s for each in rounds):.2f}",
                f"{peak / 1e6:.0f}",
                f"{(peak - imports[name]) / 1e6:.0f}",
            ]
        )
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table: a row for each way."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.export", description=__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="on the disk to measure; it is left empty")
    parser.add_argument("--size", default="gpt2_medium", choices=SIZES, help="default gpt2_medium, 354.9 M parameters")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--ways", nargs="+", choices=COMPARED, default=COMPARED, help="beside a bare copy; default: all"
    )
    options = parser.parse_args(arguments)
    folder = options.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise BenchmarkError(f"--folder: {folder} is not empty, and what is in it would be removed")
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    have_deepspeed = find_spec("deepspeed") is not None
    asked = {name: way for name, way in WAYS.items() if name in (BARE, *options.ways)}
    ways = {name: way for name, way in asked.items() if have_deepspeed or way.saved != DEEPSPEED}
    workload = Workload(size=options.size, num_ranks=2)
    saved = {DCP if way.saved == WEIGHTS else way.saved for way in ways.values()}
    for engine in (each for each in (OURS, DCP, DEEPSPEED) if each in saved):
        numel = run_ranks(save, workload.num_ranks, engine, workload, str(folder), timeout_s=1800.0)[0]
        print(f"{engine}: a checkpoint of {numel / 1e6:.1f} M parameters", flush=True)
    with (folder / "bare").open("wb") as file:
        for _ in range(4 * numel // 2**20):
            file.write(os.urandom(2**20))
    found: dict[str, list[Found]] = {name: [] for name in ways}
    names = list(ways)
    wanted: dict[str, torch.Tensor] = {}
    for number in range(options.rounds):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            found[name].append(run(ways[name], folder))
            print(f"{name}: {found[name][-1]}", flush=True)
            if "weights" in name:
                made = weights_in(folder / "out")
                wanted = wanted or {each: values.clone() for each, values in made.items()}
                require_equal(name, made, wanted)
            _remove(folder / "out")
    programs = {way.program: way for way in ways.values()}
    of_programs = {program: imports_nbytes(way, folder) for program, way in programs.items()}
    imports = {name: of_programs[way.program] for name, way in ways.items()}
    for left in folder.iterdir():
        _remove(left)
    load = ", ".join(f"{each:.1f}" for each in os.getloadavg())
    print(f"\n{numel / 1e6:.1f} M parameters, median of {options.rounds} rounds; {machine()}; load {load}\n")
    print(markdown(table(found, imports)))
    if not have_deepspeed:
        print("\nDeepSpeed is not installed (pip install -e '.[bench]')")


if __name__ == "__main__":
    main()
