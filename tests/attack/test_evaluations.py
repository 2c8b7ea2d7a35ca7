"""`zerotrain evaluate` of a run that is under way and is then killed, on as many ranks as one likes."""

import json
import shutil
import signal
import sys
from pathlib import Path

import pytest
from commands import ON_TWO_RANKS, TINY, Command

from tests.cases import EVALUATION
from tests.zygote.client import Zygote

SETTINGS = (
    "launch.nproc_per_node=4",
    "zero.stage=3",
    "zero.bucket_mb=0.02",
    "data=mix",
    "data.seq_len=32",
    "model=gpt_tiny",
    "model.num_layers=2",
    "train.max_steps=100000",
    "train.micro_batch_size=3",
    "train.eval_batches=4",
    "train.eval_every=1",
    "checkpoint.every=3",
    "checkpoint.keep=null",
)
TEXT = "text:{weight:3,data:{_target_:zerotrain.data.TextDataset,path:text.txt,seq_len:32}}"
MASKED = "masked:{weight:2,data:{_target_:masked.Masked,seq_len:32}}"


def evaluating(zygote: Zygote, folder: Path, *arguments: str, start: tuple[str, ...] = ()) -> Command:
    (folder / "temporary").mkdir(exist_ok=True)
    command = [sys.executable, *start, "-m", "zerotrain", "evaluate", *arguments, "--trust-code"]
    environment = {"TMPDIR": str(folder / "temporary")} | (zygote.for_torchrun if start else {})
    return Command(command, folder, environment, zygote.start)


def evaluated(zygote: Zygote, folder: Path, *arguments: str, start: tuple[str, ...] = ()) -> tuple[int, str, str]:
    process = evaluating(zygote, folder, *arguments, start=start)
    return process.wait(), process.stdout, process.stderr


@pytest.mark.case(
    "checkpoints",
    "of a mix, with labels of which others count in each item, while it is under way and when it "
    "was killed; by torchrun",
    "likewise on 1, 3 and 4 ranks, and on 2 by torchrun",
    under=EVALUATION,
)
def test_any_number_of_ranks_has_the_loss_of_a_run_that_is_under_way_and_was_killed(
    launch, zygote: Zygote, tmp_path: Path
) -> None:
    (tmp_path / "text.txt").write_text("".join(f"def main(): return {each}  # ünï\n" for each in range(300)))
    given = {each.partition("=")[0] for each in SETTINGS}
    tiny = [each for each in TINY if each.partition("=")[0] not in {*given, "data.num_sequences"}]
    sources = f"data.sources={{{TEXT},{MASKED}}}"
    run = launch(*tiny, *SETTINGS, sources, "hydra.run.dir=run", folder=tmp_path)
    run.wait_for_text(tmp_path / "run/metrics.jsonl", '"step": 7, "val_loss"')
    checkpoint = tmp_path / "run/checkpoints/step-00000006"
    run.wait_for_text(checkpoint / "manifest.json", "masked")
    processes = run.processes()
    for process in processes:
        process.suspend()
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    line = next(each for each in lines if each["step"] == 6 and "val_loss" in each)
    wanted = f"step 6: validation loss {line['val_loss']!r}\n"
    wanted += "".join(f"  {name}: {line[f'val_loss/{name}']!r}\n" for name in ("text", "masked"))
    assert evaluated(zygote, tmp_path, str(checkpoint), "launch.nproc_per_node=3", "zero.stage=2") == (0, wanted, "")
    for process in processes:
        process.kill()
    assert run.wait_until_gone() == []
    for num_ranks in (1, 4):
        assert evaluated(zygote, tmp_path, str(checkpoint), f"launch.nproc_per_node={num_ranks}") == (0, wanted, "")
    torchrun = ("-m", "torch.distributed.run", *ON_TWO_RANKS)
    assert evaluated(zygote, tmp_path, str(checkpoint), "zero.stage=0", start=torchrun)[:2] == (0, wanted)
    assert list((tmp_path / "temporary").glob("zerotrain_*")) == []


@pytest.mark.case(
    "checkpoints",
    "a rank fails or is killed; Ctrl-C, SIGTERM",
    "the first cause and its log, exit code 1; all end at once, nothing stays",
    under=EVALUATION,
)
def test_a_rank_that_fails_is_the_first_cause_and_a_signal_ends_all_at_once(
    launch, zygote: Zygote, tmp_path: Path
) -> None:
    tiny = [*TINY, "model._target_=misbehaving.MisbehavingMLP", "+model.action=nothing", "+model.at=0", "+model.rank=1"]
    run = launch(*tiny, "launch.nproc_per_node=2", "hydra.run.dir=run", folder=tmp_path)
    assert run.wait() == 0, run.stderr
    for action, said in (("raise", "rank 1 failed: "), ("kill", "rank 1 was killed by SIGKILL")):
        code, _, error = evaluated(zygote, tmp_path, "run", "launch.nproc_per_node=3", f"model.action={action}")
        cause, log = error.splitlines()
        assert (code, cause.startswith(said)) == (1, True), error
        assert Path(log.removeprefix("  its log: ")).is_file()
    for path in (tmp_path / "temporary").glob("zerotrain_*"):
        shutil.rmtree(path)
    for signum, code in ((signal.SIGINT, 130), (signal.SIGTERM, 143)):
        asleep = evaluating(zygote, tmp_path, "run", "launch.nproc_per_node=2", "model.action=sleep", "model.rank=0")
        asleep.wait_for_text(asleep.output_path, "asleep")
        asleep.process.send_signal(signum)
        assert asleep.wait() == code
        assert asleep.wait_until_gone() == []
        assert list((tmp_path / "temporary").glob("zerotrain_*")) == []
