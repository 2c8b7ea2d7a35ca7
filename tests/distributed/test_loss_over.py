"""What a micro-batch weighs: updates and losses are those of plain PyTorch on the whole batch, however it is shared."""

from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from cases import trainer_of

import zerotrain
from tests.ranks import run_ranks
from tests.unit.training.losses import CONFIGURED, KINDS, Rows
from zerotrain.training.callbacks.evaluation import evaluate_all
from zerotrain.training.losses import CrossEntropy, add_loss

LR, NUM_STEPS, ROWS = 0.5, 2, 12
ALL = KINDS | CONFIGURED
Trained = tuple[dict[str, torch.Tensor], list[float], str]
"""Weights, validation losses by micro-batches of 5 and of all rows, and the hash of the weights."""


def trained(
    folder: Path, stage: int, num_micro_batches: int, names: list[str], **settings: object
) -> dict[str, Trained]:
    """Each kind after some steps."""
    torch.set_num_threads(1)  # a tiny model waits for a second thread
    world, found = zerotrain.World.current(torch.device("cpu")), {}
    for name in names:
        kind = ALL[name]
        engine = zerotrain.build_engine(
            kind.made(),
            optimizer=partial(torch.optim.SGD, lr=LR),
            zero=zerotrain.ZeroConfig(stage=stage),
            world=world,
            **settings,
        )
        run_dir = folder / f"{name} {world.rank}"
        run_dir.mkdir(parents=True)
        trainer_of(
            engine,
            Rows(name, num_rows=ROWS),
            run_dir,
            max_steps=NUM_STEPS,
            micro_batch_size=ROWS // (len(engine.virtual_ranks) * world.size * num_micro_batches),
            gradient_accumulation_steps=num_micro_batches,
            collate_fn=kind.collate,
            loss_over=kind.loss_over,
        ).run()
        losses = [
            evaluate_all(
                engine=engine, world=world, dataset=Rows(name, num_rows=ROWS).validation, num_sequences=ROWS,
                collate=kind.collate, micro_batch_size=size, loss_over=kind.loss_over,
            )["val_loss"]
            for size in (5, ROWS)
        ]  # fmt: skip
        weights = {key: value.clone() for key, value in engine.full_state_dict().items()}
        found[name] = weights, losses, engine.weights_sha256()
    return found


@pytest.mark.case(
    "losses",
    "A loss that is the mean over labels, shifted labels, rows, weights of classes, labels but another ignored one; "
    "a sum; targets of -100.0, bytes, bools, shares, CTC: accumulated, on 2 and 3 ranks, with virtual ranks",
    "the updates of plain PyTorch on the whole batch to 1e-6; a validation loss that is the same at any size of "
    "micro-batches; one sha256 with the same virtual ranks",
)
def test_updates_and_losses_are_those_of_plain_pytorch_on_the_whole_batch(tmp_path, all_rows):
    ways = {  # ranks, stage, micro-batches, virtual ranks; each with half of the kinds, without --all-rows
        "6 micro-batches": (1, 1, 6, None),
        "2 x 2 x 3 rows": (2, 3, 2, None),
        "3 x 2 x 2 rows": (3, 2, 2, None),
        "4 virtual ranks": (1, 0, 1, 4),
        "4 virtual ranks, stage 1": (1, 1, 1, 4),
        "4 virtual ranks on 2": (2, 3, 1, 4),
        "4 virtual ranks on 2, stage 2": (2, 2, 1, 4),
    }
    hashes = {}
    for place, (way, (ranks, stage, micro_batches, virtual_ranks)) in enumerate(ways.items()):
        names = list(ALL)[None if all_rows else place % 2 :: 1 if all_rows else 2]
        trains = partial(trained, virtual_ranks=virtual_ranks)
        first = run_ranks(trains, ranks, tmp_path / way, stage, micro_batches, names)[0]
        for name in names:
            kind = ALL[name]
            weights, loss = kind.trained(NUM_STEPS, LR, ROWS)
            begun, (found, losses, hashes[way, name]) = kind.made().state_dict(), first[name]
            assert found.keys() == weights.keys()
            for key, value in weights.items():
                torch.testing.assert_close(
                    found[key] - begun[key], value - begun[key], atol=1e-6, rtol=0, msg=f"{way}, {name}, {key}"
                )
            assert losses == pytest.approx([loss] * 2, rel=1e-5), (way, name)
    of_virtual = [(name, hashed) for (way, name), hashed in hashes.items() if way.startswith("4 virtual ranks")]
    assert len(set(of_virtual)) == len(ALL)


def own_loop(stage: int, virtual_ranks: int) -> dict[str, torch.Tensor]:
    """A step over `ROWS` rows of a model that shifts its labels, as docs/guides/own_loop.md weighs micro-batches."""
    kind = KINDS["shifted labels"]
    with zerotrain.World.current(torch.device("cpu")) as world:
        engine = zerotrain.build_engine(
            kind.made(),
            optimizer=partial(torch.optim.SGD, lr=LR),
            zero=zerotrain.ZeroConfig(stage=stage),
            world=world,
            virtual_ranks=virtual_ranks,
        )
        size = ROWS // (2 * virtual_ranks)
        starts = [(2 * number + part) * size for number in engine.virtual_ranks for part in range(2)]
        micro_batches = [kind.batch(range(start, start + size)) for start in starts]
        counts = torch.stack([(labels[:, 1:] != -100).sum() for _, labels in micro_batches])
        total = world.sum(counts.sum().double())
        engine.train_step(micro_batches, weights=list(counts * world.size * len(engine.virtual_ranks) / total))
        return {key: value.clone() for key, value in engine.full_state_dict().items()}


@pytest.mark.parametrize(("ranks", "stage", "virtual_ranks"), [(1, 0, 1), (2, 3, 2), (1, 1, 2)])
def test_an_own_loop_weighs_shifted_labels_as_its_guide_says(ranks, stage, virtual_ranks):
    kind = KINDS["shifted labels"]
    weights, _ = kind.trained(1, LR, ROWS)
    begun, found = kind.made().state_dict(), run_ranks(own_loop, ranks, stage, virtual_ranks)[0]
    for key, value in weights.items():
        torch.testing.assert_close(found[key] - begun[key], value - begun[key], atol=1e-6, rtol=0)


def images(rows: range) -> tuple[torch.Tensor, torch.Tensor]:
    drawn = [torch.Generator().manual_seed(row) for row in rows]
    return (
        torch.stack([torch.randn(1, 6, 6, generator=each) for each in drawn]),
        torch.tensor([row % 7 for row in rows]),
    )


def convolution() -> torch.nn.Module:
    torch.manual_seed(0)
    layers = torch.nn.Conv2d(1, 5, 3), torch.nn.BatchNorm2d(5), torch.nn.ReLU(), torch.nn.Flatten()
    return torch.nn.Sequential(*layers, torch.nn.Linear(80, 7))


CLASS_WEIGHTS = [1.0, 0.5, 2.0, 1.5, 0.1, 3.0, 1.0]


def trained_on_images(stage: int) -> dict[str, torch.Tensor]:
    """Two micro-batches of 3 images on each rank, with a weight for each class."""
    with zerotrain.World.current(torch.device("cpu")) as world:
        model = convolution()
        add_loss(model, CrossEntropy(weight=CLASS_WEIGHTS), None)
        optimizer = partial(torch.optim.SGD, lr=LR)
        engine = zerotrain.build_engine(
            model, optimizer=optimizer, zero=zerotrain.ZeroConfig(stage=stage, bucket_mb=1e-4), world=world
        )
        micro_batches = [images(range(start, start + 3)) for start in (6 * world.rank, 6 * world.rank + 3)]
        counts = torch.tensor([model.loss_count(*batch) for batch in micro_batches])
        total = world.sum(counts.sum())
        engine.train_step(micro_batches, weights=list(counts * world.size / total))
        return {key: value.clone() for key, value in engine.full_state_dict().items()}


@pytest.mark.parametrize("stage", [0, 3])
def test_images_with_batch_norm_train_as_in_plain_pytorch(stage):
    # Statistics are those of each micro-batch in both, and the buffers those of rank 0.
    plain, buffers = convolution(), {}
    weight, labels = torch.tensor(CLASS_WEIGHTS), images(range(12))[1]
    for start in (0, 3, 6, 9):
        if start == 6:
            buffers = {name: buffer.clone() for name, buffer in plain.named_buffers()}
        inputs, targets = images(range(start, start + 3))
        (F.cross_entropy(plain(inputs), targets, weight, reduction="sum") / weight[labels].sum()).backward()
    found = run_ranks(trained_on_images, 2, stage)[0]
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(found[name], parameter - LR * parameter.grad, atol=1e-6, rtol=0)
    for name, buffer in buffers.items():
        torch.testing.assert_close(found[name], buffer)


T5 = {"model_type": "t5", "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2, "dropout_rate": 0.0}
BERT = {"model_type": "bert", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_labels": 3}
BERT |= {"intermediate_size": 32, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def of_transformers(task: str) -> torch.nn.Module:
    from zerotrain.models import HuggingFaceModel  # imports transformers, where it is installed

    torch.manual_seed(0)
    return HuggingFaceModel(task=task, config=dict(T5 if task == "seq2seq" else BERT), vocab_size=40)


class Pairs:
    """Sequences with answers of 1 to 6 tokens, or tags of as many."""

    def __init__(self, num_classes: int) -> None:
        drawn = torch.randint(1, 40, (2, ROWS, 6), generator=torch.Generator().manual_seed(1))
        labels = torch.where(torch.arange(6) <= torch.arange(ROWS)[:, None] * 5 % 6, drawn[1] % num_classes, -100)
        rows = zip(drawn[0], labels, strict=True)
        self.train = self.validation = [{"input_ids": ids, "labels": label} for ids, label in rows]


def trained_by_task(folder: Path, task: str, num_classes: int, stage: int) -> tuple[dict[str, torch.Tensor], float]:
    world = zerotrain.World.current(torch.device("cpu"))
    engine = zerotrain.build_engine(
        of_transformers(task),
        optimizer=partial(torch.optim.SGD, lr=LR),
        zero=zerotrain.ZeroConfig(stage=stage),
        world=world,
    )
    run_dir = folder / f"{world.rank}"
    run_dir.mkdir(parents=True)
    steps = {"max_steps": 1, "micro_batch_size": ROWS // 4, "gradient_accumulation_steps": 2}
    result = trainer_of(engine, Pairs(num_classes), run_dir, eval_batches="all", **steps).run()
    return engine.full_state_dict(), result["final_val_loss"]


@pytest.mark.parametrize(("task", "num_classes", "stage"), [("seq2seq", 40, 3), ("token_classification", 3, 1)])
def test_models_of_transformers_for_other_tasks_train_as_in_plain_pytorch(tmp_path, task, num_classes, stage):
    pytest.importorskip("transformers")
    plain = of_transformers(task).model.train()
    batch = torch.utils.data.default_collate(Pairs(num_classes).train)
    plain(**batch).loss.backward()
    weights, loss = run_ranks(trained_by_task, 2, tmp_path, task, num_classes, stage)[0]
    for name, parameter in plain.named_parameters():
        begun = parameter.detach().clone()
        with torch.no_grad():
            parameter -= LR * parameter.grad
        torch.testing.assert_close(weights[f"model.{name}"] - begun, parameter - begun, atol=1e-6, rtol=0)
    assert loss == pytest.approx(plain.eval()(**batch).loss.item(), rel=1e-5)
