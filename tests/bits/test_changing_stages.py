"""The stage changes every five steps, through 0-1-2-3-1-0: one sha256, in a loop of one's own and in runs."""

from functools import partial
from itertools import pairwise, product
from typing import Any

import pytest

from tests.bits.training import FINE_MB, Block, Net, Setup, Training, assert_same
from tests.ranks.fake_wire import run_threads
from tests.unit.training.callbacks.test_stages import HELD, KINDS, lines_of, tied_model, trainer_of, without_changes
from zerotrain.training.callbacks.checkpoints import CheckpointPolicy

ROUND = {0: 0, 5: 1, 10: 2, 15: 3, 20: 1, 25: 0}
NUM_STEPS = 30
__all__ = ["tied_model"]  # a fixture of the runs


@pytest.mark.case(
    "checkpoints",
    "every five steps through 0-1-2-3-1-0, on 2 and 3 ranks: fp32, bf16, fp16, tied, adapters on "
    "a frozen base, Muon, clipping, accumulation, `zero.accumulate=reduced`, virtual ranks; saves "
    "and evaluations between and at the changes",
    "the weights of plain PyTorch; losses and lines of the run at one stage; bytes of each rank "
    "fall and rise as the formulas",
    under="`zero.schedule` changes the stage in mid-run",
)
@pytest.mark.parametrize(
    ("precision", "muon", "virtual_ranks", "num_ranks"),
    [(*each, size, size) for each in product(("fp32", "bf16", "fp16"), (False, True)) for size in (2, 3)]
    + [("bf16", True, 6, 3)],
)
@pytest.mark.thinned(3)
def test_it_ends_with_the_weights_of_plain_pytorch(
    precision: str, muon: bool, virtual_ranks: int, num_ranks: int
) -> None:
    """With dropout, two micro-batches, clipping and a late rank; in fp16 the loss scale grows, with AdamW
    one block is frozen for two steps."""
    training = Training(
        make=partial(Net, partial(Block, dropout=0.2)),
        virtual_ranks=virtual_ranks,
        precision=precision,
        num_micro_batches=2,
        max_grad_norm=0.1,
        muon=muon,
        growth_interval=4 if precision == "fp16" else 2000,
        frozen={} if muon else {7: "blocks.0", 8: "blocks.0"},
        num_steps=NUM_STEPS,
    )
    assert_same(training, Setup(num_ranks, stage=2, bucket_mb=FINE_MB, is_late=True, stages=ROUND))


WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "each micro-batch reduced": ("bf16, Muon", {"zero": {"accumulate": "reduced"}}),
    "one micro-batch, without overlap": ("fp32", {"gradient_accumulation_steps": 1, "zero": {"overlap": False}}),
    "without clipping": ("fp16, its scale growing", {}),
} | {kind: (kind, {}) for kind in KINDS}


@pytest.mark.case(
    "checkpoints",
    "every five steps through 0-1-2-3-1-0, on 2 and 3 ranks: fp32, bf16, fp16, tied, adapters on "
    "a frozen base, Muon, clipping, accumulation, `zero.accumulate=reduced`, virtual ranks; saves "
    "and evaluations between and at the changes",
    under="`zero.schedule` changes the stage in mid-run",
)
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.thinned(2)
def test_a_run_is_the_run_at_one_stage(way, size, tied_model, tmp_path, monkeypatch):
    """Evaluations every four steps and saves every seven fall before, between and behind the changes."""
    kind, changes = WAYS[way]
    if way == "without clipping":
        monkeypatch.setitem(KINDS, kind, KINDS[kind] | {"max_grad_norm": None})
    policy = CheckpointPolicy(every_steps=7, keep=None, at_end=False)

    def run(world, folder, **more):
        how = changes | {"max_steps": NUM_STEPS, "checkpoint": policy} | more
        return trainer_of(world, tied_model, tmp_path / folder, kind=kind, **how).run()

    [fixed, *_], _ = run_threads(partial(run, folder="fixed", stage=2), size)
    [changing, *_], _ = run_threads(partial(run, folder="changing", stages=ROUND), size, late_rank=size - 1)
    for name in ("weights_sha256", "final_train_loss", "final_val_loss", "skipped_steps", "steps"):
        assert changing[name] == fixed[name], name
    assert without_changes(lines_of(tmp_path / "changing")) == lines_of(tmp_path / "fixed")
    assert [(each["from_step"], each["stage"]) for each in changing["stages"]] == list(ROUND.items())
    held = [[each[f"{name}_nbytes"] for name in HELD] for each in (entry["ranks"][0] for entry in changing["stages"])]
    theory = [[each["ranks"][0][f"theory_{name}_nbytes"] for name in HELD] for each in changing["stages"]]
    assert held[0] == held[5]
    assert held[1] == held[4]
    for (one, other), (one_wanted, other_wanted) in zip(pairwise(held), pairwise(theory), strict=True):
        for before, now, before_wanted, now_wanted in zip(one, other, one_wanted, other_wanted, strict=True):
            assert (now > before, now < before) == (now_wanted > before_wanted, now_wanted < before_wanted)
