"""What is done with a run of four ranks at stage 3: evaluate, generate; one launch for all."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.cases import EVALUATION, GENERATION, WRONG_RUN
from tests.zygote.client import Zygote
from zerotrain.checkpoint.folder import PartialFolder
from zerotrain.commands import evaluate, generate
from zerotrain.commands.export import main as export
from zerotrain.saved.text_model import characters

pytestmark = pytest.mark.usefixtures("evaluates_here")

SETTINGS = (
    "zero.stage=3",
    "launch.nproc_per_node=4",
    "launch.threads_per_rank=1",
    "launch.device=cpu",
    "data.seq_len=32",
    "model.num_layers=2",
    "model.hidden_size=32",
    "train.max_steps=3",
    "train.micro_batch_size=3",
    "train.eval_every=1",
    "train.eval_batches=2",
    "train.sample_tokens=0",
    "precision=bf16",
    "checkpoint.every=2",
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, zygote: Zygote) -> Path:
    folder = tmp_path_factory.mktemp("after")
    (folder / "text.txt").write_text("".join(f"def main(): return {each}  # ünï\n" for each in range(300)))
    settings = [*SETTINGS, f"hydra.run.dir={folder}/run", f"data.path={folder}/text.txt"]
    ended = zygote.run(settings, folder)
    assert ended.code == 0, ended.out + ended.err
    return folder / "run"


def losses_of(run: Path) -> dict[int, float]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["val_loss"] for line in lines if "val_loss" in line}


@pytest.mark.case(
    "checkpoints",
    EVALUATION,
    "the run's own loss, to the bit; nothing changes in the run's folder, no temporary one stays",
)
def test_the_validation_loss_is_the_runs_own_to_the_bit(run: Path, capsys) -> None:
    wanted = losses_of(run)
    for name, step in (("checkpoints/step-00000002", 2), ("", 3)):
        assert evaluate.main([str(run / name)]) == 0
        assert capsys.readouterr().out == f"step {step}: validation loss {wanted[step]!r}\n"
    for setting in ("train.eval_batches=1", "data.seq_len=16"):
        assert evaluate.evaluate(run, [setting])[1]["val_loss"] != wanted[3]


@pytest.mark.slow
@pytest.mark.case("checkpoints", EVALUATION)
def test_ranks_that_do_not_divide_the_micro_batches_come_to_the_same_bits(
    run: Path, tmp_path: Path, capfd, monkeypatch
) -> None:
    """Six micro-batches of four ranks at stage 3, the last one ragged; the run's folder stays as it is."""
    files = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert evaluate.main([str(run), "launch.nproc_per_node=3", "zero.stage=1"]) == 0
    assert capfd.readouterr().out == f"step 3: validation loss {losses_of(run)[3]!r}\n"
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == files
    assert list(tmp_path.glob("zerotrain_*")) == []


@pytest.mark.case("checkpoints", GENERATION)
@pytest.mark.case(
    "checkpoints",
    "of an exported folder, plain, in parts, of DCP, of a Llama; of merged adapters",
    "the run's loss, to the bit; of merged ones up to rounding",
    under=EVALUATION,
)
def test_an_exported_folder_is_evaluated_and_continued_as_the_run(run: Path, tmp_path: Path, capsys) -> None:
    text = ["--prompt", "def main", "--max-tokens", "12"]
    assert generate.main([str(run), *text]) == 0
    wanted = capsys.readouterr().out
    for name, options in (("weights", ["--shard-mb", "0.02"]), ("dcp", ["--dcp"])):
        path = tmp_path / name
        assert export([str(run), "--out", str(path), *options]) == 0
        assert evaluate.evaluate(path) == (3, {"val_loss": losses_of(run)[3]})
        capsys.readouterr()
        assert generate.main([str(path), *text]) == 0
        assert capsys.readouterr().out == wanted
    for file in tmp_path.rglob("*.safetensors"):
        file.write_bytes(file.read_bytes()[:100])
    for command in (evaluate.main, lambda given: generate.main([*given, "--prompt", "a"])):
        assert command([str(tmp_path / "weights")]) == 2
        [line] = capsys.readouterr().err.splitlines()
        assert "is cut" in line


@pytest.mark.case("checkpoints", WRONG_RUN, "one line, exit code 2", under=EVALUATION)
def test_a_run_that_was_interrupted_and_a_save_that_was_cut_off(run: Path, tmp_path: Path, capsys) -> None:
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    half = PartialFolder(tmp_path / "run" / "checkpoints" / "step-00000003").path
    for command in (evaluate.main, lambda given: generate.main([*given, "--prompt", "a"])):
        for path in (tmp_path / "run", half):
            assert command([str(path)]) == 2
            [line] = capsys.readouterr().err.splitlines()
            assert "a save" in line
            assert "cut off" in line
    shutil.copytree(run / "checkpoints" / "step-00000002", tmp_path / "run" / "checkpoints" / "step-00000002")
    assert evaluate.evaluate(tmp_path / "run")[1]["val_loss"] == losses_of(run)[2]
    assert generate.main([str(tmp_path / "run"), "--prompt", "def", "--max-tokens", "3"]) == 0


@pytest.mark.case("checkpoints", WRONG_RUN, under=EVALUATION)
def test_damage_is_told_with_file_and_tensor(run: Path, tmp_path: Path, capsys) -> None:
    copy = tmp_path / "checkpoint"
    shutil.copytree(run / "checkpoints" / "step-00000003", copy)
    content = bytearray((copy / "rank-00002.safetensors").read_bytes())
    content[-1] ^= 1
    (copy / "rank-00002.safetensors").write_bytes(content)
    for command in (generate.main, lambda given: evaluate.main(given[:1])):
        assert command([str(copy), "--prompt", "a"]) == 2
        [line] = capsys.readouterr().err.splitlines()
        assert "rank-00002.safetensors is not what was written" in line
        assert "weight of" in line


@pytest.mark.case("checkpoints", GENERATION, "text in whole characters; the same from all")
def test_text_goes_on_from_a_prompt_and_from_each_line_of_the_input(run: Path, capsys, monkeypatch) -> None:
    options = ["--max-tokens", "40", "--seed", "5"]  # more than the model looks back on
    assert generate.main([str(run), "--prompt", "def main", *options]) == 0
    text = capsys.readouterr().out
    assert text.startswith("def main")
    (run.parent / "lines.txt").write_bytes(b"def main\n\nx\xff\n")
    with open(run.parent / "lines.txt") as lines, monkeypatch.context() as changed:
        changed.setattr(sys, "stdin", lines)
        assert generate.main([str(run), *options]) == 0
    both = capsys.readouterr().out
    assert both.startswith(text + "x\ufffd")
    assert generate.main([str(run), "--prompt", "def main", *options, "--temperature", "0"]) == 0
    greedy = capsys.readouterr().out
    assert generate.main([str(run), "--prompt", "def main", *options, "--top-k", "1"]) == 0
    assert capsys.readouterr().out == greedy


def test_a_reader_who_goes_away_ends_the_text_without_a_word(run: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "zerotrain", "generate", str(run), "--prompt", "a", "--max-tokens", "3"]
    with os.fdopen(writer, "w") as stdout:
        ended = subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True)
    assert (ended.returncode, ended.stderr) == (-signal.SIGPIPE, "")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("nowhere", "--prompt", "a"), "nowhere is not there: give"),
        (("run", "--prompt", "a", "--temperature", "-1"), "--temperature: got -1.0; it must be 0"),
        (("run", "--prompt", "a", "--top-k", "0"), "--top-k: got 0; it must be 1 or more"),
    ],
)
def test_what_cannot_be_is_one_line(run: Path, arguments, said: str, capsys) -> None:
    assert generate.main([str(run.parent / arguments[0]), *arguments[1:]]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert said in line


@pytest.mark.case("checkpoints", GENERATION)
def test_characters_come_whole_and_what_is_none_comes_too() -> None:
    def decode(ids: list[int]) -> str:
        return bytes(ids).decode(errors="replace")

    text = "aü€😀b"
    assert list(characters(decode, [120], text.encode())) == list(text)
    broken = bytes([0xFF, 0xFE, 97, 0x80, 0x80, 0x80, 0x80, 0x80, 98])
    assert "".join(characters(decode, [120], broken)) == decode(list(broken))
    assert "".join(characters(decode, [120], "ü".encode()[:1])) == "\ufffd"
