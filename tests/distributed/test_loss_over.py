"""What a micro-batch weighs: updates and losses are those of plain PyTorch on the whole batch, however it is shared."""

from functools import partial
from pathlib import Path

import pytest
import torch
from cases import trainer_of

import zerotrain
from tests.unit.training.losses import KINDS, ROWS, Kind, Rows
from zerotrain.testing import run_ranks
from zerotrain.training.callbacks.evaluation import evaluate_all

LR, NUM_STEPS = 0.5, 3


def trained(
    folder: Path, num_micro_batches: int, kinds: dict[str, Kind], **settings: object
) -> dict[str, tuple[dict[str, torch.Tensor], list[float]]]:
    """(weights, validation losses by micro-batches of 1, 3 and 8 rows) of each kind after some steps."""
    world, found = zerotrain.World.current(torch.device("cpu")), {}
    for name, kind in kinds.items():
        engine = zerotrain.build_engine(
            kind.made(),
            optimizer=partial(torch.optim.SGD, lr=LR),
            zero=zerotrain.ZeroConfig(stage=2),
            world=world,
            **settings,
        )
        run_dir = folder / f"{name} {world.rank}"
        run_dir.mkdir(parents=True)
        trainer_of(
            engine,
            Rows(name),
            run_dir,
            max_steps=NUM_STEPS,
            micro_batch_size=ROWS // (len(engine.virtual_ranks) * world.size * num_micro_batches),
            gradient_accumulation_steps=num_micro_batches,
            collate_fn=kind.collate,
            loss_over=kind.loss_over,
        ).run()
        losses = [
            evaluate_all(
                engine=engine, world=world, dataset=Rows(name).validation, num_sequences=ROWS, collate=kind.collate,
                micro_batch_size=size, loss_over=kind.loss_over,
            )["val_loss"]
            for size in (1, 3, 8)
        ]  # fmt: skip
        found[name] = {key: value.clone() for key, value in engine.full_state_dict().items()}, losses
    return found


@pytest.mark.case(
    "losses",
    "A loss that is the mean over labels, shifted labels, rows, weights of classes, labels but another ignored one; "
    "targets of -100.0, bytes, bools, shares, CTC: accumulated, on 2 ranks, with virtual ranks",
    "the updates of plain PyTorch on the whole batch to 1e-6; a validation loss that is the same at any size of "
    "micro-batches",
)
@pytest.mark.parametrize(
    ("ranks", "micro_batches", "settings"),
    [(1, 1, {}), (1, 8, {}), (2, 1, {}), (2, 2, {}), (2, 1, {"virtual_ranks": 4})],
    ids=["1 x 8 rows", "8 micro-batches", "2 x 4 rows", "2 x 2 x 2 rows", "virtual ranks"],
)
def test_updates_and_losses_are_those_of_plain_pytorch_on_the_whole_batch(tmp_path, ranks, micro_batches, settings):
    for first, *_ in [run_ranks(partial(trained, **settings), ranks, tmp_path, micro_batches, KINDS)]:
        for name, kind in KINDS.items():
            weights, loss = kind.trained(NUM_STEPS, LR)
            begun = kind.made().state_dict()
            assert first[name][0].keys() == weights.keys()
            for key, value in weights.items():
                update = first[name][0][key] - begun[key]
                torch.testing.assert_close(update, value - begun[key], atol=1e-6, rtol=0)
            assert first[name][1] == pytest.approx([loss] * 3, rel=1e-5), name
