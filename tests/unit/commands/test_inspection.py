"""`zerotrain inspect`."""

import os
import re
import shutil
import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path

import pytest

import zerotrain
from tests.ranks.fake_wire import run_threads
from tests.unit.checkpoint.runs import KINDS, build, train
from zerotrain.checkpoint import verification as compare
from zerotrain.checkpoint.folder import PartialFolder, set_aside, set_best, step_name
from zerotrain.commands.inspection import main


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two checkpoints: a step apart, and of another placement."""
    folder = tmp_path_factory.mktemp("checkpoints")

    def save(world: zerotrain.World) -> None:
        engine = build(world, KINDS["a frozen base in bf16 with adapters"], 2)
        train(engine, 0)
        engine.save(folder / "first")

    def go_on(world: zerotrain.World) -> None:
        engine = build(world, KINDS["a frozen base in bf16 with adapters"], 3)
        engine.load(folder / "first")
        engine.save(folder / "again")
        train(engine, 1)
        engine.save(folder / "second")

    run_threads(save, 2)
    run_threads(go_on, 3)
    return folder


def test_it_tells_what_a_checkpoint_holds_and_that_it_is_whole(saved: Path) -> None:
    command = [sys.executable, "-X", "importtime", "-m", "zerotrain", "inspect", str(saved / "second")]
    process = subprocess.run(command, capture_output=True, text=True, env=os.environ)
    assert process.returncode == 0, process.stderr
    lines = process.stdout.splitlines()
    assert lines[0] == f"{saved / 'second'}: step 2, saved by 3 ranks (3 virtual) at stage 3 in bf16"
    assert "13 parameters of 3,120 elements, 432 of them trained; 0 buffers; 0.0 MiB in 3 files" in lines
    assert "group 'parameters': AdamW, lr 0.05" in lines
    assert "  blocks.0.weight   24x24  weight bfloat16, frozen" in lines
    assert "  down.0.weight     3x24  weight float32, exp_avg float32, exp_avg_sq float32, step 2" in lines
    assert lines[-1] == "verified: the manifest and 3 blocks in 3 files are what was written"
    assert "zerotrain.engine" not in process.stderr
    assert re.search(r"zerotrain\.comm\b", process.stderr) is None


@pytest.mark.parametrize("chunk_numel", [1, 100, 2**20])
def test_two_that_differ_are_compared_tensor_by_tensor_to_their_end_whatever_their_placement(
    saved: Path, chunk_numel: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = str(saved / "first"), str(saved / "second")
    assert main(["--diff", first, str(saved / "again")]) == 0
    assert capsys.readouterr().out == "0 of 25 tensors differ (step 1 against step 1)\n"
    assert main(["--diff", first, second]) == 1
    out = capsys.readouterr().out
    assert "exp_avg of up.1.weight: 72 of 72 elements, by up to " in out
    assert "weight of blocks" not in out
    assert "18 of 25 tensors differ (step 1 against step 2)" in out
    monkeypatch.setattr(compare, "CHUNK_NUMEL", chunk_numel)
    assert main(["--diff", first, second]) == 1
    assert capsys.readouterr().out == out


def test_of_two_runs_the_newest_checkpoints_are_compared(saved: Path, tmp_path: Path, capsys) -> None:
    for run, name in (("one", "first"), ("other", "second")):
        shutil.copytree(saved / "first", tmp_path / run / "checkpoints" / step_name(1))
        shutil.copytree(saved / name, tmp_path / run / "checkpoints" / step_name(2))
    one, other = str(tmp_path / "one"), str(tmp_path / "other")
    assert main(["--diff", one, str(tmp_path / "one" / "checkpoints")]) == 0
    assert capsys.readouterr().out == "0 of 25 tensors differ (step 1 against step 1)\n"
    assert main(["--diff", one, other]) == 1
    assert "18 of 25 tensors differ (step 1 against step 2)" in capsys.readouterr().out
    assert main(["--diff", one, str(tmp_path)]) == 2
    assert f"{tmp_path} has no checkpoint in it" in capsys.readouterr().err


def test_a_broken_one_is_told_with_its_file_and_is_in_the_exit_code_wherever_it_stands(saved, tmp_path, capsys) -> None:
    whole, broken = str(saved / "first"), str(shutil.copytree(saved / "second", tmp_path / "broken"))
    file = Path(broken, "rank-00002.safetensors")
    content = bytearray(file.read_bytes())
    content[-1] ^= 128
    file.write_bytes(content)
    assert main([whole, broken]) == 1
    out = capsys.readouterr().out
    assert out.count("are what was written\n") == 1
    assert "BROKEN: do not load it" in out
    assert f"{file} is not what was written: bytes 0 to {len(content)} are others (" in out
    assert main([broken, whole]) == main([broken, "--diff", whole, str(saved / "again")]) == 1
    assert main([whole, "--diff", whole, str(saved / "second")]) == 1
    assert main([whole, "--diff", whole, str(saved / "again")]) == 0


def test_what_is_neither_a_checkpoint_nor_a_run_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    for path, said in (
        (tmp_path, "is no checkpoint and no run: it has no manifest.json, and none of checkpoints/, config.y"),
        (tmp_path / "file", "file is a file, and no folder of a checkpoint or of a run"),
        (tmp_path / "nowhere", "nowhere is not there: give the folder of a checkpoint or of a run"),
    ):
        assert main([str(path)]) == 2
        err = capsys.readouterr().err
        assert said in err
        assert err.count("\n") == 1
    with pytest.raises(SystemExit):
        main([])
    assert "give the PATH of a checkpoint or of a run, or --diff A B" in capsys.readouterr().err


@pytest.mark.case(
    "checkpoints",
    "`zerotrain inspect RUN`",
    "each checkpoint verified, saves under way or cut off, how to go on",
)
def test_a_run_is_listed_with_what_lies_beside_its_checkpoints(saved, tmp_path, capsys) -> None:
    folder = tmp_path / "checkpoints"
    for step in (10, 20, 30):
        shutil.copytree(saved / "second", folder / step_name(step))
    os.utime(folder / step_name(20) / "manifest.json", (0, 1_000_000_000))
    assert main([str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{tmp_path}: 3 checkpoints"
    when = datetime.fromtimestamp(1_000_000_000)
    assert re.fullmatch(rf"step-00000020  {when}  0\.0 MiB  stage 3, 3 ranks  verified in \d\.\d s", lines[2])
    assert lines[4:] == [f"to go on from step-00000030: checkpoint.resume={tmp_path}"]

    (folder / step_name(10) / "rank-00001.safetensors").unlink()
    (folder / step_name(30) / "manifest.json").write_text("{")
    alive = PartialFolder(folder / step_name(40))
    dead = folder / f".{step_name(50)}.partial-0123456789abcdef"
    dead.mkdir()
    (dead / "lock").touch()
    old = time.time() - 60
    for path in (alive.path, dead):
        os.utime(path, (old, old))
    removed = folder / f".{step_name(1)}.removed-0123456789abcdef"
    removed.mkdir()
    aside = set_aside(Path(shutil.copytree(saved / "second", folder / step_name(60))))
    set_best(folder / step_name(20), folder)
    assert main([str(folder)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].endswith("stage 3, 3 ranks  BROKEN: do not load it")
    assert lines[2].startswith(f"  {folder / step_name(10)}/rank-00001.safetensors is missing")
    assert lines[3].startswith("step-00000020  ")
    assert lines[4:6] == ["step-00000030  BROKEN: do not load it", lines[5]]
    assert "manifest.json is damaged: it is no JSON" in lines[5]
    assert lines[6:] == [
        f"{alive.path.name}: a save under way, 0.0 MiB so far",
        f"{dead.name}: a save that was cut off; the next one removes it",
        f"{removed.name}: a removal under way or cut off; the next one removes it",
        f"{aside.name}: set aside when the run went on from an earlier one",
        "best: step-00000020, of the best evaluation",
        f"to go on from step-00000020: checkpoint.resume={folder / step_name(20)}",
    ]
    alive.remove()


@pytest.mark.parametrize("name", ["config.yaml", "result.json", "checkpoints"])
def test_a_run_without_checkpoints_is_listed_and_is_no_success(name, tmp_path, capsys) -> None:
    (tmp_path / name).mkdir()
    assert main([str(tmp_path)]) == 2
    assert capsys.readouterr().out == f"{tmp_path}: no checkpoints\n"
