"""`zerotrain export`: what is trained leaves in the forms of others."""

import ctypes
import errno
import functools
import gc
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed.checkpoint as dcp

import zerotrain
from tests.cases import EXPORT
from tests.ranks.fake_wire import run_threads
from tests.ranks.processes import HANG_S
from tests.unit.checkpoint.runs import KINDS, build, train
from tests.unit.commands.my_model import loss_of, make_model
from zerotrain.checkpoint.folder import PartialFolder
from zerotrain.checkpoint.verification import CheckpointTensors
from zerotrain.commands.export import main
from zerotrain.commands.export_folder import FILES, require_apart
from zerotrain.saved.saved import ABOUT

safetensors_torch = pytest.importorskip("safetensors.torch")

ONE_SEED_AT_A_TIME = threading.Lock()


def exported(checkpoint: Path, out: Path, *options: str) -> Path:
    assert main([str(checkpoint), "--out", str(out), *options]) == 0
    return out


def tensors_in(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= safetensors_torch.load_file(file)
    return found


@pytest.fixture(scope="module")
def hard(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    """A checkpoint of four ranks at stage 3, of tied, transposed, frozen, empty and odd parameters; what they were."""
    path = tmp_path_factory.mktemp("hard") / "checkpoint"

    def save(world: zerotrain.World) -> dict[str, torch.Tensor]:
        engine = build(world, KINDS["hard parameters, AdamW"], 3)
        train(engine, 0, 1)
        engine.save(path)
        return engine.full_state_dict()

    return path, run_threads(save, 4)[0][0]


@pytest.mark.case("checkpoints", EXPORT, "opened by safetensors, the same bits; the first name of a tied one")
@pytest.mark.parametrize("megabytes", ["5000", "0.002"], ids=["one file", "parts"])
def test_the_weights_of_four_ranks_are_opened_by_safetensors(hard, megabytes: str, tmp_path: Path) -> None:
    path, weights = hard
    out = exported(path, tmp_path / "out", "--shard-mb", megabytes)
    found = tensors_in(out)
    assert found.keys() == weights.keys() - {"output.weight"}  # tied to the embedding
    assert all(torch.equal(found[name], weights[name]) for name in found)
    assert found["turned"].is_contiguous()
    index = out / "model.safetensors.index.json"
    assert index.exists() == (megabytes == "0.002")
    if index.exists():
        told = json.loads(index.read_text())
        assert told["weight_map"].keys() == found.keys()
        assert told["metadata"]["total_size"] == sum(tensor.nbytes for tensor in found.values())
        assert {path.name for path in out.glob("*.safetensors")} == set(told["weight_map"].values())


@pytest.mark.case("checkpoints", EXPORT)
def test_a_dtype_is_rounded_to_and_integers_stay(hard, tmp_path: Path) -> None:
    path, weights = hard
    found = tensors_in(exported(path, tmp_path / "out", "--dtype", "bf16"))
    assert torch.equal(found["odd"], weights["odd"].bfloat16())
    assert torch.equal(found["table"], weights["table"])
    assert found["num_calls"].dtype == torch.int64


MEBIBYTES = [4, 12, 3, 16, 1] * 4
"""Sizes between which malloc leaves what a larger one does not fit into."""


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a tensor of each size, with momentum."""
    model = torch.nn.ParameterList(torch.zeros(each * 2**18) for each in MEBIBYTES)
    optimizer = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    engine = zerotrain.build_engine(model, optimizer=optimizer)
    engine.backward(sum(each[0] for each in model))
    engine.step()
    return engine.save(tmp_path_factory.mktemp("large") / "checkpoint")


@pytest.mark.case("checkpoints", "memory", "one tensor at a time", under=EXPORT)
@pytest.mark.parametrize("options", [(), ("--optimizer",), ("--dcp",)], ids=["weights", "optimizer", "dcp"])
def test_one_tensor_at_a_time_is_held(hard, large: Path, options: tuple[str, ...], tmp_path: Path, monkeypatch) -> None:
    resident = []
    exported(hard[0], tmp_path / "first", *options)  # imports
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # or what the training has left is used
    read = CheckpointTensors._dense

    def noted(saved: CheckpointTensors, *given: Any) -> torch.Tensor:
        resident.append(psutil.Process().memory_info().rss)
        return read(saved, *given)

    monkeypatch.setattr(CheckpointTensors, "_dense", noted)
    exported(large, tmp_path / "out", *options)
    assert len(resident) == len(MEBIBYTES) * (2 if options else 1)
    assert max(resident) - resident[0] < 48 * 2**20  # of 144 MiB, and as many of the optimizer


@pytest.mark.case(
    "checkpoints", "`--optimizer`", "torch's AdamW makes the engine's next step, bit for bit", under=EXPORT
)
@pytest.mark.parametrize("stage", [0, 3])
def test_the_optimizers_state_in_adamw_of_torch_makes_the_next_step_of_the_engine(stage: int, tmp_path: Path) -> None:
    groups = [{"params": ["*weight"], "lr": 0.03}, {"params": ["*bias"], "weight_decay": 0.0}]

    def save(world: zerotrain.World) -> dict[str, torch.Tensor]:
        engine = zerotrain.build_engine(
            seeded(),
            optimizer=functools.partial(torch.optim.AdamW, lr=0.05),
            zero=zerotrain.ZeroConfig(stage=stage, bucket_mb=0.004, reduction="ordered"),
            param_groups=groups,
            world=world,
        )
        for step in range(3):
            engine.backward(loss_of(engine, step))
            engine.step()
            if step == 1:
                engine.save(tmp_path / "checkpoint")
        return engine.full_state_dict()

    wanted = run_threads(save, 4)[0][0]
    out = exported(tmp_path / "checkpoint", tmp_path / "out", "--optimizer")
    model = make_model()
    model.load_state_dict(tensors_in(out))
    named, saved = dict(model.named_parameters()), torch.load(out / "optimizer.pt", weights_only=True)
    optimizer = torch.optim.AdamW(
        [{"params": [named[name] for name in each["params"]]} for each in saved["param_groups"]]
    )
    optimizer.load_state_dict(saved)
    loss_of(model, 2).backward()
    optimizer.step()
    assert {name: torch.equal(parameter, wanted[name]) for name, parameter in named.items()} == dict.fromkeys(
        named, True
    )


def test_a_rate_that_was_scheduled_is_told_beside_the_one_it_began_with(tmp_path: Path) -> None:
    engine = zerotrain.build_engine(seeded(), optimizer=functools.partial(torch.optim.AdamW, lr=0.05))
    for group in engine.param_groups:
        group["lr"] = 0.01
    engine.save(tmp_path / "checkpoint")
    out = exported(tmp_path / "checkpoint", tmp_path / "out", "--optimizer")
    groups = torch.load(out / "optimizer.pt", weights_only=True)["param_groups"]
    assert [(group["lr"], group["initial_lr"]) for group in groups] == [(0.01, 0.05)] * len(groups)


def seeded() -> torch.nn.Module:
    with ONE_SEED_AT_A_TIME:
        torch.manual_seed(0)
        return make_model()


@pytest.mark.case("checkpoints", "`--dcp`", under=EXPORT)
@pytest.mark.filterwarnings("ignore:.*single process:UserWarning")
def test_plain_torch_loads_the_folder_of_dcp(hard, tmp_path: Path) -> None:
    path, weights = hard
    out = exported(path, tmp_path / "out", "--dcp")
    optimizer = torch.load(exported(path, tmp_path / "pt", "--optimizer") / "optimizer.pt", weights_only=True)
    nothing = {name: torch.full_like(value, 9) for name, value in weights.items()}
    kept = {
        name: {key: torch.full_like(value, 9) for key, value in each.items()}
        for name, each in optimizer["state"].items()
    }
    state = {"model": nothing, "optim": {"state": kept, "param_groups": optimizer["param_groups"]}}
    dcp.load(state, checkpoint_id=out, no_dist=True)
    assert [name for name in weights if not torch.equal(nothing[name], weights[name])] == []
    assert "output.weight" in nothing  # tied, and there under each of its names
    assert len(kept) > 5
    for name, each in optimizer["state"].items():
        assert each.keys() == {"step", "exp_avg", "exp_avg_sq"}
        assert [key for key in each if not torch.equal(kept[name][key], each[key])] == []


@pytest.mark.case("checkpoints", "an export loaded again; a Llama of transformers loaded and exported", "the same bits")
@pytest.mark.parametrize("options", [(), ("--dcp",)], ids=["safetensors", "dcp"])
@pytest.mark.parametrize("stage", [0, 3])
def test_what_went_out_comes_in_unchanged(hard, stage: int, options: tuple[str, ...], tmp_path: Path) -> None:
    path, weights = hard
    out = exported(path, tmp_path / "out", *options)

    def on_a_rank(world: zerotrain.World) -> None:
        engine = build(world, KINDS["hard parameters, AdamW"], stage, seed=1)
        engine.load_weights(out)
        got = engine.full_state_dict()
        assert [name for name in got if not torch.equal(got[name], weights[name])] == []

    run_threads(on_a_rank, 3)


@pytest.mark.case(
    "checkpoints",
    "onto something that is there; damaged; cut off; no such dtype",
    "one line, exit code 2; nothing replaced, nothing left",
    under=EXPORT,
)
def test_nothing_is_replaced_unless_asked_and_then_an_export_alone(hard, tmp_path: Path, capsys) -> None:
    path, _ = hard
    out = exported(path, tmp_path / "out")
    before = (out / "model.safetensors").read_bytes()
    assert refused([str(path), "--out", str(out)], capsys).startswith(f"--out: got {out}, which is there already")
    assert (out / "model.safetensors").read_bytes() == before
    exported(path, out, "--overwrite", "--dtype", "bf16")
    assert tensors_in(out)["odd"].dtype == torch.bfloat16
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.txt").write_text("years")
    said = refused([str(path), "--out", str(mine), "--overwrite"], capsys)
    assert f"{mine} is no folder that zerotrain.export has written" in said
    assert sorted(each.name for each in tmp_path.iterdir()) == ["mine", "out"]
    assert (mine / "thesis.txt").read_text() == "years"


def test_a_disk_that_fails_at_the_last_moment_leaves_the_export_that_was_there(hard, tmp_path, monkeypatch, capsys):
    out = exported(hard[0], tmp_path / "out")
    before = (out / "model.safetensors").read_bytes()

    def fail(partial: PartialFolder) -> None:
        raise OSError(errno.EIO, "Input/output error", str(partial.path))

    monkeypatch.setattr(PartialFolder, "appear", fail)
    assert main([str(hard[0]), "--out", str(out), "--overwrite", "--dtype", "bf16"]) == 1
    assert "cannot be written: Input/output error" in capsys.readouterr().err
    assert (out / "model.safetensors").read_bytes() == before
    assert [each.name for each in tmp_path.iterdir()] == ["out"]


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    assert main(arguments) == 2
    [line] = capsys.readouterr().err.splitlines()
    return line


@pytest.mark.case("checkpoints", "onto something that is there; damaged; cut off; no such dtype", under=EXPORT)
@pytest.mark.parametrize(
    ("path", "options", "said"),
    [
        ("nowhere", (), "nowhere is not there: give"),
        ("checkpoint", ("--dtype", "int3"), "--dtype: got int3; it must be one of fp32, bf16, fp16"),
        ("checkpoint", ("--merge",), "has no adapters to merge"),
        ("checkpoint", ("--shard-mb", "0"), "--shard-mb: got 0.0; it must be"),
        ("checkpoint", ("--dcp", "--dtype", "bf16"), "--dcp: writes weights and optimizer state as they are"),
        ("checkpoint", ("--out", "/dev/null/out"), "/dev/null/out cannot be written: File exists"),
        (".checkpoint.partial-0123456789abcdef", (), "is of a save that was cut off"),
        ("half", (), "half has no checkpoint: only a save that was cut off is there"),
    ],
)
def test_what_cannot_be_is_one_line(hard, path, options, said, capsys, tmp_path: Path) -> None:
    (tmp_path / ".checkpoint.partial-0123456789abcdef").mkdir()
    (tmp_path / "half" / ".step-00000002.partial-0123456789abcdef").mkdir(parents=True)
    (tmp_path / "checkpoint").symlink_to(hard[0])
    assert said in refused([str(tmp_path / path), "--out", str(tmp_path / "out"), *options], capsys)
    assert not (tmp_path / "out").exists()


@pytest.mark.case("checkpoints", "onto something that is there; damaged; cut off; no such dtype", under=EXPORT)
def test_damage_is_told_with_file_and_tensor_and_leaves_nothing(tmp_path: Path, capsys) -> None:
    def save(world: zerotrain.World) -> None:
        build(world, KINDS["hard parameters, AdamW"], 3).save(tmp_path / "checkpoint")

    run_threads(save, 2)
    file = tmp_path / "checkpoint" / "rank-00001.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    for options in ((), ("--dcp",)):
        said = refused([str(tmp_path / "checkpoint"), "--out", str(tmp_path / "out"), *options], capsys)
        assert f"{file} is not what was written" in said
        assert "weight of " in said
        assert [each.name for each in tmp_path.iterdir()] == ["checkpoint"]


@pytest.mark.parametrize("options", [("--optimizer", "--shard-mb", "0.002"), ("--dcp",)], ids=["optimizer", "dcp"])
def test_every_file_is_on_the_disk_before_the_folder_appears(hard, options, tmp_path: Path, monkeypatch) -> None:
    """After a power cut an optimizer.pt of zeros would lie there."""
    synced: dict[int, bytes] = {}
    fsync, rename = os.fsync, os.rename

    def content(path: Path) -> bytes:
        return path.read_bytes() if path.is_file() else b""

    def note(descriptor: int) -> None:
        synced[os.fstat(descriptor).st_ino] = content(Path(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    def move(source: Path, target: Path) -> None:
        if target == tmp_path / "out":
            written = [path for path in (source, *source.iterdir()) if path.name != "lock"]
            assert [path for path in written if synced.get(path.stat().st_ino) != content(path)] == []
            synced.clear()
        rename(source, target)

    monkeypatch.setattr(os, "fsync", note)
    monkeypatch.setattr(os, "rename", move)
    exported(hard[0], tmp_path / "out", *options)
    assert synced.keys() == {tmp_path.stat().st_ino}  # which has its name


def told_of_small_files(arguments: list[str], out: Path, capsys: pytest.CaptureFixture[str]) -> dict[int, str]:
    """What an export says, by the size in bytes that no file may exceed, as on a disk that is full then."""
    told = {}
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    for nbytes in (0, 1, 60, 300, 900, 2000, 5000, 9000, 20_000, 10**9):
        capsys.readouterr()
        resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
        try:
            code = main([*arguments, "--out", str(out / "out")])
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        told[nbytes] = capsys.readouterr().err
        if code == 0:
            shutil.rmtree(out / "out")
        else:
            assert (code, told[nbytes].count("\n")) == (1, 1)
            assert str(out) in told[nbytes]
            assert told[nbytes].endswith(("cannot be written: File too large\n", "could not write all of a file\n"))
        assert list(out.iterdir()) == []
    return told


@pytest.mark.parametrize("options", [(), ("--optimizer",), ("--dcp",)], ids=["weights", "optimizer", "dcp"])
def test_a_disk_that_takes_a_part_of_any_file_is_one_line(hard, options, tmp_path: Path, capsys) -> None:
    told = told_of_small_files([str(hard[0]), *options], tmp_path, capsys)
    assert len([1 for said in told.values() if said]) > 4
    assert told[10**9] == ""


# `--overwrite` and `--out` erase nothing but what an earlier export has written.


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with one checkpoint."""
    run = tmp_path_factory.mktemp("saved") / "run"
    optimizer = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    engine = zerotrain.build_engine(torch.nn.Linear(4, 4), optimizer=optimizer)
    engine.save(run / "checkpoints" / "step-00000000")
    return run


@pytest.fixture
def run(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "run"))


def contents(folder: Path) -> dict[str, str | bytes | None]:
    """All that lies in a folder: links, files and folders."""

    def content(path: Path) -> str | bytes | None:
        return os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else None

    return {str(path.relative_to(folder)): content(path) for path in folder.rglob("*")}


def said_by(out: Path) -> dict[str, object]:
    found: dict[str, object] = json.loads((out / ABOUT).read_text())
    return found


def test_an_export_notes_its_files_and_is_replaced_with_none_left(run: Path, tmp_path: Path) -> None:
    out = exported(run, tmp_path / "out", "--shard-mb", "0.00005")
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json"]
    assert said_by(out)[FILES] == names
    exported(run, out, "--overwrite", "--dcp")
    assert sorted(contents(out)) == sorted([*said_by(out)[FILES], ABOUT])  # type: ignore[misc]
    assert said_by(out)["checkpoint"] == str(run / "checkpoints/step-00000000")
    exported(run, out, "--overwrite")
    assert sorted(contents(out)) == ["model.safetensors", ABOUT]
    assert sorted(each.name for each in tmp_path.iterdir()) == ["out", "run"]


def put_link(out: Path) -> None:
    (out / "model.safetensors").rename(out.parent / "weights")
    (out / "model.safetensors").symlink_to(out.parent / "weights")


def put_folder(out: Path) -> None:
    (out / "model.safetensors").unlink()
    (out / "model.safetensors").mkdir()
    (out / "model.safetensors" / "thesis.txt").write_text("years")


@pytest.mark.parametrize(
    ("put", "name"),
    [
        (lambda out: (out / "thesis.txt").write_text("years"), "thesis.txt"),
        (lambda out: (out / "mine/deep").mkdir(parents=True) or (out / "mine/deep/.notes").touch(), "mine"),
        (lambda out: (out / "mine").mkdir(), "mine"),
        (lambda out: (out / "mine").symlink_to(out.parent / "run"), "mine"),
        (lambda out: os.mkfifo(out / "fifo"), "fifo"),
        (put_link, "model.safetensors"),
        (put_folder, "model.safetensors"),
    ],
    ids=["file", "file deep inside", "folder", "link", "fifo", "link for a file of ours", "folder for a file of ours"],
)
def test_what_a_user_has_put_there_is_named_and_stays(put, name, run, tmp_path, capsys) -> None:
    out = exported(run, tmp_path / "out")
    put(out)
    before = contents(tmp_path)
    said = refused([str(run), "--out", str(out), "--overwrite"], capsys)
    assert said == (
        f"--overwrite: {out / name} was not written by the export in that folder; move it away, or give a new name"
    )
    assert contents(tmp_path) == before


def test_a_file_that_comes_while_the_new_export_is_written_stays(run, tmp_path, capsys, monkeypatch) -> None:
    out = exported(run, tmp_path / "out")
    write = zerotrain.commands.export_folder.write_safetensors

    def written(*given: object, **options: object) -> int:
        (out / "thesis.txt").write_text("years")
        return write(*given, **options)

    monkeypatch.setattr(zerotrain.commands.export_folder, "write_safetensors", written)
    assert f"{out}/thesis.txt was not written" in refused([str(run), "--out", str(out), "--overwrite"], capsys)
    assert sorted(contents(out)) == sorted(["model.safetensors", "thesis.txt", ABOUT])
    assert sorted(each.name for each in tmp_path.iterdir()) == ["out", "run"]


@pytest.mark.parametrize(
    ("files", "said"),
    [
        (None, "does not list the files of an export"),
        (
            ["../thesis.txt"],
            "does not list the files of an export: files[0]: got ../thesis.txt; it must be the name of a file",
        ),
        (["/etc/passwd"], "does not list the files of an export"),
        (
            ["model.safetensors", 3],
            "does not list the files of an export: files[1]: got 3; it must be the name of a file",
        ),
        ([f"{'a/' * 3000}b"], "model.safetensors was not written by the export in that folder"),
    ],
)
def test_a_list_of_files_is_believed_within_its_folder_alone(files, said, run, tmp_path, capsys) -> None:
    (tmp_path / "thesis.txt").write_text("years")
    out = exported(run, tmp_path / "out")
    told = {name: each for name, each in said_by(out).items() if name != FILES}
    (out / ABOUT).write_text(json.dumps(told if files is None else told | {FILES: files}))
    before = contents(tmp_path)
    assert said in refused([str(run), "--out", str(out), "--overwrite"], capsys)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("overwrite", [(), ("--overwrite",)], ids=["", "overwrite"])
@pytest.mark.parametrize("given", ["run", "run/checkpoints", "run/checkpoints/step-00000000", "link", "old/link"])
@pytest.mark.parametrize(
    "out",
    ["run/out", "run/checkpoints/out", "run/checkpoints/step-00000000/out", "link/out", "x/../run/out", "run/a/b/c"],
)
def test_an_export_does_not_lie_in_its_run(out, given, overwrite, run, tmp_path, capsys) -> None:
    (tmp_path / "link").symlink_to(run)
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "link").symlink_to(run / "checkpoints" / "step-00000000")
    before = contents(tmp_path)
    said = refused([str(tmp_path / given), "--out", str(tmp_path / out), *overwrite], capsys)
    assert ", the folder to export; give another folder" in said
    assert contents(tmp_path) == before


@pytest.mark.parametrize("name", ["out", "link", "out/.", "out/run/..", "above/out"])
def test_a_run_that_lies_in_an_earlier_export_is_not_replaced(name, run, tmp_path, capsys) -> None:
    out = exported(run, tmp_path / "out")
    run.rename(out / "run")
    (tmp_path / "link").symlink_to(out)
    (tmp_path / "above").symlink_to(tmp_path)
    before = contents(tmp_path)
    refused([str(out / "run"), "--out", str(tmp_path / name), "--overwrite"], capsys)
    assert contents(tmp_path) == before
    told = said_by(out)  # though it calls the run's files its own
    told[FILES] = [str(path.relative_to(out)) for path in out.rglob("*") if path.is_file() and path.name != ABOUT]
    (out / ABOUT).write_text(json.dumps(told))
    before = contents(tmp_path)
    refused([str(out / "run"), "--out", str(tmp_path / name), "--overwrite"], capsys)
    assert contents(tmp_path) == before


def test_the_model_and_the_tokenizer_that_are_read_are_not_replaced(tmp_path: Path) -> None:
    """Adapters would lose the model that they are for."""
    model, apart = tmp_path / "model", tmp_path / "apart"
    model.mkdir()
    with pytest.raises(zerotrain.ConfigError, match="which is read for this export, lies there"):
        require_apart(model, tmp_path / "checkpoint", [model])
    require_apart(apart, tmp_path / "checkpoint", [model])
    require_apart(model / "out", tmp_path / "checkpoint", [model])


# An export that a signal ends leaves nothing, and what was there before.

SLOW = """
import sys, time
from zerotrain.commands import export, export_folder
from zerotrain.files.terminal import run_command
write = export_folder.write_safetensors
def slow(folder, *given, **options):
    write(folder, *given, **options)
    print("written", flush=True)
    time.sleep(3600)
export_folder.write_safetensors = slow
run_command(export.main)
"""


@pytest.mark.parametrize(
    ("signals", "code"),
    [((signal.SIGTERM,), 143), ((signal.SIGHUP,), 129), ((signal.SIGINT, signal.SIGINT, signal.SIGTERM), 130)],
    ids=["SIGTERM", "SIGHUP", "Ctrl-C, again and again"],
)
@pytest.mark.thinned(3, first=1)
def test_a_signal_leaves_nothing_and_what_was_there(signals, code, run, tmp_path) -> None:
    out = exported(run, tmp_path / "out")
    before = contents(tmp_path)
    command = [sys.executable, "-c", SLOW, str(run), "--out", str(out), "--overwrite"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ, preexec_fn=heed_signals
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "written\n"
    for each in signals:
        process.send_signal(each)
        time.sleep(0.005)
    _, said = process.communicate(timeout=HANG_S)
    assert (process.returncode, "Traceback" in said, said.count("\n")) == (code, False, 1)
    assert "nothing is left" in said
    assert contents(tmp_path) == before


def heed_signals() -> None:
    """In the child: one that a shell has started in the background ignores Ctrl-C, and one behind nohup SIGHUP."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
