"""Text is prepared whatever becomes of the process, the disk and the machines; nothing done is lost or done twice."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from commands import REPOSITORY

from tests.ranks.processes import HANG_S
from tests.unit.data.tokenizers_made import END, sample, saved
from tests.zygote.client import Forked, Zygote

Begin = Callable[..., Forked]


@pytest.fixture
def begin(zygote: Zygote, tmp_path: Path) -> Begin:
    """Start a process that prepares; NAME.err and NAME.out get what it prints. Never a fork of this process: a library
    that had threads here, as tokenizers has, waits for them there for ever."""

    def start(name: str, **options: object) -> Forked:
        options = {"cache_dir": str(tmp_path / "cache"), **options}
        (tmp_path / f"{name}.err").touch()
        return zygote.start(
            [sys.executable, str(Path(__file__).with_name("prepares.py")), json.dumps(options)],
            cwd=tmp_path,
            env=zygote.environment,
            stdout=str(tmp_path / f"{name}.out"),
            stderr=str(tmp_path / f"{name}.err"),
        )

    return start


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + HANG_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.002)


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Half a MB in one line, and 300 rows."""
    folder = tmp_path_factory.mktemp("corpus") / "texts"
    folder.mkdir()
    (folder / "a.txt").write_text((sample() * 10)[:500_000].replace("\n", " "))
    rows = [json.dumps({"text": sample()[start : start + 700]}) for start in range(0, 60_000, 200)]
    (folder / "b.jsonl").write_text("\n".join(rows))
    return folder


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    return saved("Llama 2", tmp_path_factory.mktemp("tokenizer"), eos_token=END)


def files_of(folder: Path) -> dict[str, bytes]:
    """Of a store."""
    return {path.name: path.read_bytes() for path in (*folder.glob("*.bin"), folder / "index.json")}


@pytest.mark.case(
    "data: Text", "killed anywhere while preparing", "goes on behind the last finished shard, to the same bits"
)
@pytest.mark.parametrize("given", ["bytes", "tokens"])
def test_who_is_killed_anywhere_goes_on_there_and_comes_to_the_same_bits(
    given: str, texts: Path, tokenizer: str, tmp_path: Path, begin: Begin
):
    starts = []

    def make(out: Path, *, slow: bool = False) -> Forked:
        starts.append(f"start{len(starts)}")
        options = {"tokenizer": tokenizer, "shard_tokens": 30_000} if given == "tokens" else {"shard_tokens": 60_000}
        return begin(starts[-1], path=str(texts), out=str(out), slow=slow, **options)

    assert make(tmp_path / "undisturbed").wait() == 0
    undisturbed = files_of(tmp_path / "undisturbed")
    killed = tmp_path / "killed"
    for num_files in (1, 6, 10, 14):  # shards and notes, also those that have no name yet
        process = make(killed, slow=True)
        wait_until(lambda: len(list(killed.glob("0*"))) >= num_files)  # noqa: B023
        os.kill(process.pid, signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
        assert not (killed / "seal.json").exists()
    assert make(killed).wait() == 0
    assert files_of(killed) == undisturbed
    assert {path.name for path in killed.iterdir()} == {*undisturbed, "lock", "seal.json"}
    printed = "".join((tmp_path / f"{start}.err").read_text() for start in starts)
    goes_on = [line for line in printed.splitlines() if "goes on at" in line]
    assert len(goes_on) == 3


@pytest.mark.case(
    "data: Text",
    "several prepare the same",
    "one works, the others say for whom they wait; a dead one is taken over from",
)
def test_of_two_at_once_one_waits_and_takes_over_where_the_other_was_killed(texts: Path, tmp_path: Path, begin: Begin):
    first = begin("first", path=str(texts), shard_tokens=100_000, hangs=True)
    wait_until(lambda: list((tmp_path / "cache").glob("*/*.note")) != [])
    second, third = (begin(name, path=str(texts), shard_tokens=100_000) for name in ("second", "third"))

    def printed(name: str) -> str:
        return (tmp_path / f"{name}.err").read_text()

    waits = f"waits for pid {first.pid} on "
    wait_until(lambda: all(waits in printed(name) for name in ("second", "third")))
    os.kill(first.pid, signal.SIGKILL)
    assert [first.wait(), second.wait(), third.wait()] == [-signal.SIGKILL, 0, 0]
    assert len([name for name in ("second", "third") if "goes on at" in printed(name)]) == 1
    [store] = (tmp_path / "cache").iterdir()
    tokens = b"".join(path.read_bytes() for path in sorted(store.glob("0*.bin")))
    assert tokens.startswith((texts / "a.txt").read_bytes() + b"\n")


DISKS = r"""
import json, os, sys
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from zerotrain.data import prepare
from zerotrain.commands.prepare import main

prepare.SHARD_TOKENS, prepare.BATCH_NBYTES, prepare.PIECE_NBYTES = 100_000, 1 << 15, 0

def run(*arguments):
    with redirect_stdout(StringIO()) as out, redirect_stderr(StringIO()) as err:
        code = main(arguments)
    print(json.dumps([code, out.getvalue().splitlines(), err.getvalue().splitlines()]))

def shell(command):
    assert os.system(command) == 0

text = f"data.path={sys.argv[1]}"
shell("mkdir disk && mount -t tmpfs -o size=256k tmpfs disk")
run(text, "--out", "disk/tokens")
print(json.dumps(sorted(os.listdir("disk/tokens"))))
run(text, "data.cache_dir=disk/cache")
shell("rm -r disk/cache && mount -o remount,size=8m disk")
run(text, "--out", "disk/tokens")
run(text, "data.cache_dir=disk/cache")
shell("mount -o remount,ro disk")
run(text, "data.cache_dir=disk/cache")
run(text, "data.cache_dir=disk/cache", "data.document_end=none")
run(text, "--out", "disk/other")
"""


@pytest.mark.case(
    "data: Text",
    "the disk is full, or only read",
    "one line with the setting; finished work stays; an existing store is used",
)
def test_a_disk_that_is_full_or_only_read_is_named_and_nothing_done_is_lost(texts: Path, tmp_path: Path):
    isolated = ["unshare", "--map-root-user", "--mount"]
    if shutil.which("unshare") is None or subprocess.run([*isolated, "true"], capture_output=True).returncode:
        pytest.skip("needs a mount namespace of its own")
    process = subprocess.run(
        [*isolated, sys.executable, "-c", DISKS, str(texts)],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr
    full, left, full_cache, gone_on, cached, read_only, not_there, no_out = map(json.loads, process.stdout.splitlines())
    reads = f"data.path={texts}: reads 2 files (1 .txt, 1 .jsonl)"
    no_room = "has no room for the prepared text (No space left on device); what is done is kept, and the same command "
    assert (full[0], full[1], full[2][0]) == (2, [], reads)
    assert full[2][-1] == f"--out=disk/tokens {no_room}goes on: make room, or give another folder"
    assert "index.json" not in left
    assert full_cache[0] == 2
    assert full_cache[2][-1].startswith(f"data.cache_dir=disk/cache {no_room}")
    assert (gone_on[0], gone_on[2][0]) == (0, reads)
    assert gone_on[2][1].startswith("preparing: goes on at 0.")
    assert cached[0] == 0
    assert read_only == [0, cached[1], []]
    for code, out, err in (not_there, no_out):
        assert (code, out) == (2, [])
        assert "cannot take the prepared text ([Errno 30] Read-only file system: 'disk/" in err[-1]
        assert err[-1].endswith("give a folder that can be written")


def test_a_long_line_takes_little_memory_and_small_files_little_time(tokenizer: str, tmp_path: Path, begin: Begin):
    """150 bytes of memory a byte of a line before, 600 MB for these 4. Of 200 MB in a line, and of 50,000 files, see
    docs/results/log/2026-11-22_data.md."""
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts/line.txt").write_text((sample() * 100)[:4_000_000].replace("\n", " "))
    for number in range(2000):
        (tmp_path / f"texts/{number}.txt").write_text(f"file {number}")
    process = begin("make", path=str(tmp_path / "texts"), tokenizer=tokenizer, cache_dir=str(tmp_path), small=False)
    assert process.wait() == 0, (tmp_path / "make.err").read_text()
    printed = json.loads((tmp_path / "make.out").read_text())
    assert printed["documents"] == 2001
    assert printed["grown_mb"] < 350
