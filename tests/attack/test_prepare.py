"""Text is prepared whatever becomes of the process, the disk and the machines; nothing done is lost or done twice."""

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from commands import REPOSITORY, TINY, by_torchrun, result_of

from tests.unit.data.tokenizers_made import END, sample, saved
from zerotrain.data.preparing import lock as prepare_lock
from zerotrain.data.preparing import writer as prepare_writer
from zerotrain.data.preparing.prepared import prepared, prepared_in, recipe_of
from zerotrain.testing.limits import HANG_S


def begun(function: Callable[[], object], errors: Path) -> int:
    """A process that does something; its stderr goes to a file. Forked: it need not import all again."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
        sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
        function()
        code = 0
    finally:
        os._exit(code)


def ended(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


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


@pytest.mark.parametrize("given", ["bytes", "tokens"])
def test_who_is_killed_anywhere_goes_on_there_and_comes_to_the_same_bits(
    given: str, texts: Path, tokenizer: str, tmp_path: Path, monkeypatch
):
    monkeypatch.setattr(prepare_writer, "NOTE_S", 0.0)
    monkeypatch.setattr(prepare_writer, "SHARD_TOKENS", 100_000)
    monkeypatch.setattr("zerotrain.data.preparing.prepare.BATCH_NBYTES", 1 << 15)
    monkeypatch.setattr("zerotrain.data.preparing.prepare.PIECE_NBYTES", 0)

    def make(out: Path) -> None:
        recipe, _ = recipe_of(
            str(texts),
            tokenizer=tokenizer if given == "tokens" else None,
            document_end=None,
            text_field="text",
            cache_dir=str(tmp_path / "cache"),
            out=out,
        )
        prepared_in(recipe, out)

    def tokens_noted() -> int:
        with open(killed / "preparing.json") as file:
            return int(json.load(file)["tokens"])

    def goes_on() -> list[str]:
        return [line for line in (tmp_path / "err").read_text().splitlines() if "goes on at" in line]

    def has_come_to(tokens: float, start: int) -> bool:
        return len(goes_on()) == start and (killed / "preparing.json").exists() and tokens_noted() >= tokens

    assert ended(begun(lambda: make(tmp_path / "undisturbed"), tmp_path / "err")) == 0
    undisturbed = files_of(tmp_path / "undisturbed")
    total = sum(shard["tokens"] for shard in json.loads(undisturbed["index.json"])["shards"])
    killed = tmp_path / "killed"
    for start, part in enumerate((0.0, 0.1, 0.5, 0.9)):
        pid = begun(lambda: make(killed), tmp_path / "err")
        wait_until(lambda: has_come_to(part * total, start))  # noqa: B023
        os.kill(pid, signal.SIGKILL)
        assert ended(pid) == -signal.SIGKILL
        assert not (killed / "seal.json").exists()
    assert ended(begun(lambda: make(killed), tmp_path / "err")) == 0
    assert files_of(killed) == undisturbed
    assert {path.name for path in killed.iterdir()} == {*undisturbed, "lock", "seal.json"}
    assert len(goes_on()) == 4
    assert goes_on()[-1] != goes_on()[0]


def test_of_two_at_once_one_waits_and_takes_over_where_the_other_was_killed(texts, tmp_path, monkeypatch):
    monkeypatch.setattr(prepare_writer, "NOTE_S", 0.0)
    monkeypatch.setattr(prepare_lock, "REMINDER_S", 0.2)
    monkeypatch.setattr("zerotrain.data.preparing.prepare.BATCH_NBYTES", 1 << 15)

    def make() -> None:
        recipe, cache = recipe_of(
            str(texts), tokenizer=None, document_end=None, text_field="text", cache_dir=str(tmp_path / "cache")
        )
        prepared(recipe, cache)

    def make_slowly() -> None:
        note = prepare_writer.StoreWriter.note
        monkeypatch.setattr(
            prepare_writer.StoreWriter, "note", lambda *given, **more: note(*given, **more) or time.sleep(3600)
        )
        make()

    first = begun(make_slowly, tmp_path / "first")
    wait_until(lambda: list((tmp_path / "cache").glob("*/preparing.json")) != [])
    second, third = (begun(make, tmp_path / name) for name in ("second", "third"))
    waits = f"waits for pid {first} on "
    wait_until(lambda: all(waits in (tmp_path / name).read_text() for name in ("second", "third")))
    os.kill(first, signal.SIGKILL)
    assert [ended(first), ended(second), ended(third)] == [-signal.SIGKILL, 0, 0]
    went_on = [name for name in ("second", "third") if "goes on at" in (tmp_path / name).read_text()]
    assert len(went_on) == 1
    [store] = (tmp_path / "cache").iterdir()
    assert (store / "000000.bin").read_bytes().startswith((texts / "a.txt").read_bytes() + b"\n")


DISKS = r"""
import json, os, sys
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from zerotrain.data.preparing import prepare
from zerotrain.data.preparing import writer as prepare_writer
from zerotrain.commands.prepare import main

prepare_writer.NOTE_S, prepare.BATCH_NBYTES, prepare.PIECE_NBYTES = 0.0, 1 << 15, 0

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


def test_a_long_line_takes_little_memory_and_small_files_little_time(tokenizer: str, tmp_path: Path):
    """150 bytes of memory a byte of a line before, 600 MB for these 4. Of 200 MB in a line, and of 50,000 files, see
    docs/results/log/2026-11-22_data.md."""
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts/line.txt").write_text((sample() * 100)[:4_000_000].replace("\n", " "))
    for number in range(2000):
        (tmp_path / f"texts/{number}.txt").write_text(f"file {number}")

    def make() -> None:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        recipe, cache = recipe_of(
            str(tmp_path / "texts"), tokenizer=tokenizer, document_end=None, text_field="text", cache_dir=str(tmp_path)
        )
        store = prepared(recipe, cache)
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        print("grown by", grown // 1024, "MB,", len(store.documents), "documents", file=sys.stderr)

    assert ended(begun(make, tmp_path / "err")) == 0
    said = (tmp_path / "err").read_text().splitlines()[-1].split()
    assert said[4:] == ["2001", "documents"]
    assert int(said[2]) < 350


def test_machines_without_a_common_folder_prepare_each_for_itself_before_the_ranks_meet(texts, tmp_path):
    """A collective that waited for one that tokenised ended the run after launch.timeout_s."""
    store = ("--rdzv-backend=c10d", "--rdzv-conf=store_type=file", f"--rdzv-endpoint={tmp_path / 'store'}")
    options = ("--nnodes=2", "--nproc-per-node=1", "--rdzv-id=job", *store)
    data = ("data=text", "data._target_=misbehaving.SlowText", f"data.path={texts}", "data.cache_dir=cache")
    run = [each for each in TINY if not each.startswith("data")]
    machines = [tmp_path / name for name in ("one", "other")]
    for folder in machines:
        folder.mkdir()
    commands = [
        by_torchrun(
            *run, *data, "data.seq_len=16", "launch.timeout_s=12", f"hydra.run.dir={tmp_path / 'run'}",
            folder=folder, options=options,
        )
        for folder in machines
    ]  # fmt: skip
    assert [command.wait() for command in commands] == [0, 0], [command.stderr for command in commands]
    assert result_of(tmp_path / "run")["status"] == "completed"
    for folder in machines:
        assert [path.name for path in (folder / "cache").glob("*/seal.json")] == ["seal.json"]
    said = "".join(command.stderr for command in commands)
    assert "rank 0 waits for the machine of rank 1, which prepares its data (10 s)" in said
