"""From here to FSDP2 and back: the script of docs/guides/fsdp2.md, as it stands there, on two processes."""

import functools
import re
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import zerotrain
from tests.cases import EXPORT, WEIGHTS
from tests.ranks.fake_wire import run_threads
from tests.unit.commands.my_model import loss_of, make_model, tokens_of
from tests.unit.commands.test_export import ONE_SEED_AT_A_TIME, exported

DOCS = Path(__file__).resolve().parents[3] / "docs" / "guides" / "fsdp2.md"
SCRIPT = re.search(r"```python\n# fsdp2\.py\n(.*?)```", DOCS.read_text(), re.DOTALL)
FIRST, LAST = 2, 6


def engine_of(world: zerotrain.World, stage: int, seed: int) -> zerotrain.ZeroEngine:
    with ONE_SEED_AT_A_TIME:
        torch.manual_seed(seed)
        model = make_model()
    optimizer = functools.partial(torch.optim.AdamW, lr=0.05, weight_decay=0.1)
    return zerotrain.build_engine(model, optimizer=optimizer, zero=zerotrain.ZeroConfig(stage), world=world)


@pytest.fixture(scope="module")
def gone_on(zygote, tmp_path_factory) -> tuple[Path, list[list[float]], list[list[float]]]:
    """What the script has saved; its losses by rank, and those of the run that stayed here."""
    folder = tmp_path_factory.mktemp("fsdp2")

    def train(world: zerotrain.World) -> list[float]:
        engine = engine_of(world, 3, 0)
        losses = []
        for step in range(LAST):
            if step == FIRST:
                engine.save(folder / "checkpoint")
            loss = loss_of(engine, step, world.rank)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        return losses[FIRST:]

    stayed = run_threads(train, 2)[0]
    exported(folder / "checkpoint", folder / "exported", "--dcp")
    assert SCRIPT is not None
    assert len(SCRIPT[1].splitlines()) <= 35
    (folder / "fsdp2.py").write_text(SCRIPT[1])
    shutil.copy(Path(__file__).with_name("my_model.py"), folder)
    torchrun = ["--standalone", "--nproc-per-node", "2", "fsdp2.py", "exported", "saved", str(FIRST), str(LAST)]
    done = zygote.run(torchrun, folder, {"PYTHONPATH": ""}, module="torch.distributed.run")
    assert done.code == 0, done.err
    told = re.findall(r"rank (\d) step (\d+) loss ([-+.\de]+)", done.out)  # two ranks may share a line
    went = [[float(loss) for of, _, loss in sorted(told) if int(of) == rank] for rank in range(2)]
    return folder / "saved", went, stayed


@pytest.mark.slow
@pytest.mark.case(
    "checkpoints",
    "`--dcp`",
    "FSDP2 goes on to the losses of the run that stayed, within fp32 rounding; plain torch loads the same bits",
    under=EXPORT,
)
def test_fsdp2_goes_on_from_an_exported_folder_to_the_losses_of_the_run_that_stayed(gone_on) -> None:
    _, went, stayed = gone_on
    assert [len(losses) for losses in went] == [LAST - FIRST] * 2
    torch.testing.assert_close(torch.tensor(went), torch.tensor(stayed), rtol=1e-6, atol=1e-6)
    untrained = [loss_of(make_model(), step).item() for step in range(FIRST, LAST)]
    assert max(abs(torch.tensor(went[0]) - torch.tensor(untrained))) > 0.1  # or this would show nothing


@pytest.mark.case("checkpoints", "a folder that FSDP2 has saved", "the same logits", under=WEIGHTS)
@pytest.mark.parametrize("stage", [0, 3])
def test_what_fsdp2_has_saved_is_taken_and_gives_equal_logits(gone_on, stage: int) -> None:
    saved, _, _ = gone_on
    model = make_model()
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=saved, no_dist=True)
    model.load_state_dict(state["model"])
    wanted = model(tokens_of(LAST))

    def on_a_rank(world: zerotrain.World) -> None:
        engine = engine_of(world, stage, 1)
        loaded = engine.load_weights(saved)
        assert loaded.told() == [f"4 tensors loaded from {saved}; its 'model' was read, and nothing of optim"]
        assert torch.equal(engine(tokens_of(LAST)), wanted)

    run_threads(on_a_rank, 2)
