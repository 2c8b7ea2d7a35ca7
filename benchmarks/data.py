"""`python -m benchmarks.data reads`: batches of a large file of tokens, by pread and by a memory map, cold and warm;
`python -m benchmarks.data prepare`: text made into tokens, beside Hugging Face's `datasets.map` and a plain loop."""

import argparse
import mmap
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from benchmarks import data_prepare
from zerotrain.data.store import Shard, TokenStore
from zerotrain.data.windows import TokenWindows, whole

VOCAB_SIZE = 50257
PIECE_NBYTES = 1 << 26
Read = Callable[[np.ndarray], torch.Tensor]


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The options. Ends the process with exit code 2 on one that is not allowed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.data", description=__doc__)
    commands = parser.add_subparsers(dest="what", required=True)
    data_prepare.add_options(commands)
    add = commands.add_parser("reads", help="batches of one file").add_argument
    add("--gigabytes", type=float, default=20.0, help="size of the file")
    add("--folder", type=Path, default=Path("outputs/bench/data"), help="where the file is made, and removed again")
    add("--batch", type=int, default=16, help="rows of a batch")
    add("--seq-len", type=int, default=1024, help="tokens of a row")
    add("--batches", type=int, default=20, help="batches of each way in a round")
    add("--rounds", type=int, default=5, help="times each way is measured, in turn with the others")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    """Measure and print a table."""
    options = parse(arguments)
    if options.what == "prepare":
        data_prepare.measure(options)
        return
    options.folder.mkdir(parents=True, exist_ok=True)
    path = options.folder / "reads.bin"
    try:
        _write_tokens(path, int(options.gigabytes * 1e9) // 2)
        print(f"{path.stat().st_size / 1e9:.1f} GB of uint16, batches of {options.batch} x {options.seq_len}, ", end="")
        print(f"{options.rounds} rounds of {options.batches} batches; the median batch of all rounds")
        print(f"{'':32}{'cold ms':>10}{'cold MB read':>14}{'warm ms':>10}")
        for name, (cold_ms, cold_mb, warm_ms) in _measure(path, options).items():
            print(f"{name:32}{cold_ms:10.2f}{cold_mb:14.2f}{warm_ms:10.2f}")
    finally:
        path.unlink(missing_ok=True)


def _write_tokens(path: Path, num_tokens: int) -> None:
    rng = np.random.default_rng(0)
    piece = rng.integers(0, VOCAB_SIZE, PIECE_NBYTES // 2, dtype=np.uint16)
    with path.open("wb") as file:
        for start in range(0, num_tokens, len(piece)):
            file.write(piece[: num_tokens - start].tobytes())
        file.flush()
        os.fsync(file.fileno())


def _measure(path: Path, options: argparse.Namespace) -> dict[str, tuple[float, float, float]]:
    """For each way to read: ms a batch cold, MB read from the disk for it, ms a batch warm."""
    store = TokenStore([Shard(path, path.stat().st_size // 2)], np.dtype("<u2"))
    windows = whole(store, seq_len=options.seq_len, vocab_size=VOCAB_SIZE, source=str(path))
    ways = {
        "memory map (before)": lambda: _mapped(path, windows, advice=None),
        "memory map, MADV_RANDOM": lambda: _mapped(path, windows, advice=mmap.MADV_RANDOM),
        "pread (TokenWindows.rows)": lambda: _by_rows(windows),
    }
    rng = np.random.default_rng(1)
    taken: dict[str, list[tuple[float, float, float]]] = {name: [] for name in ways}
    for _ in range(options.rounds):
        for name, way in ways.items():
            batches = rng.integers(0, len(windows), (options.batches, options.batch))
            _forget(path)
            read = way()
            for batch in batches:
                nbytes_before, begun = _nbytes_read(), time.perf_counter()
                read(batch)
                cold_s, nbytes = time.perf_counter() - begun, _nbytes_read() - nbytes_before
                begun = time.perf_counter()
                read(batch)
                taken[name].append((cold_s * 1e3, nbytes / 1e6, (time.perf_counter() - begun) * 1e3))
    return {name: _medians(each) for name, each in taken.items()}


def _medians(taken: list[tuple[float, float, float]]) -> tuple[float, float, float]:
    cold_ms, cold_mb, warm_ms = (statistics.median(column) for column in zip(*taken, strict=True))
    return cold_ms, cold_mb, warm_ms


def _by_rows(windows: TokenWindows) -> Read:
    return lambda batch: windows.rows(batch.tolist())[0]


def _mapped(path: Path, windows: TokenWindows, advice: int | None) -> Read:
    """As TokenFiles read until 2026-11-22: row by row of a memory map, each row looked through, then stacked."""
    tokens = np.memmap(path, dtype="<u2", mode="r")
    if advice is not None:
        tokens._mmap.madvise(advice)  # type: ignore[attr-defined]
    seq_len = windows.seq_len

    def read(batch: np.ndarray) -> torch.Tensor:
        rows = []
        for index in batch.tolist():
            row = tokens[index * seq_len : (index + 1) * seq_len + 1].astype(np.int64)
            if int(row.max()) >= VOCAB_SIZE:
                raise ValueError(f"row {index} holds {row.max()}")
            rows.append((torch.tensor(row[:-1]), torch.tensor(row[1:])))
        torch.stack([labels for _, labels in rows])
        return torch.stack([ids for ids, _ in rows])

    return read


def _forget(path: Path) -> None:
    """Drop a file from the page cache. What is mapped stays, so maps are made anew for each round."""
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _nbytes_read() -> int:
    """Bytes this process has had read from disks; on Linux."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("read_bytes")).split()[1])


if __name__ == "__main__":
    main()
