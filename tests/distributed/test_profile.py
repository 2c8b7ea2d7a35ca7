"""The trace of a run: one file a rank, with ranges named by unit, bucket and collective."""

import gc
import json
from pathlib import Path

from cases import OPTIMIZERS, make_model, trainer_of

import zerotrain
from tests.ranks import run_ranks
from zerotrain.data import SyntheticTokens
from zerotrain.training.callbacks.profile import NUM_STEPS_BEFORE, NUM_TRACED_STEPS

NUM_STEPS = NUM_STEPS_BEFORE + NUM_TRACED_STEPS
BLOCKS = [f"blocks.{index}" for index in range(3)]


def train(stages: tuple[int, ...], folder: Path) -> None:
    for stage in stages:
        run_dir = folder / f"stage{stage}"
        run_dir.mkdir(exist_ok=True)
        engine = zerotrain.build_engine(
            make_model(),
            optimizer=OPTIMIZERS["adamw"],
            zero=zerotrain.ZeroConfig(stage=stage, bucket_mb=0.2),
            max_grad_norm=1.0,
            activation_checkpointing=True,
        )
        dataset = SyntheticTokens(seq_len=32, vocab_size=256, num_sequences=64)
        trainer_of(engine, dataset, run_dir, max_steps=NUM_STEPS, profile=True).run()
        del engine
        gc.collect()  # the trace, which what ended after it must not have written to


def num_ranges(path: Path) -> dict[str, int]:
    """How often each named range occurs in a trace."""
    events = json.loads(path.read_text())["traceEvents"]
    names = [event["name"] for event in events if event.get("cat") == "user_annotation"]
    return {name: names.count(name) for name in names}


def test_each_rank_writes_a_trace_with_the_units_and_collectives_of_three_steps(tmp_path: Path) -> None:
    run_ranks(train, 2, (0, 2, 3), tmp_path)
    for rank in range(2):
        replicated = num_ranges(tmp_path / "stage0" / "profile" / f"rank{rank}.json")
        sharded = num_ranges(tmp_path / "stage3" / "profile" / f"rank{rank}.json")
        for ranges in (replicated, sharded):
            assert ranges["norm of the gradient"] == NUM_TRACED_STEPS
            for block in BLOCKS:
                assert ranges[f"forward {block}"] == ranges[f"recompute {block}"] == NUM_TRACED_STEPS
            for bucket in ["root", *BLOCKS]:
                for action in ("reduce", "wait for reduce", "sum"):
                    assert ranges[f"{action} {bucket}"] == NUM_TRACED_STEPS
            updates = [number for name, number in ranges.items() if name.startswith("optimizer ")]
            assert updates == [NUM_TRACED_STEPS]  # of buckets so small one call updates all
        # Once for the forward and once for the backward, but the last unit is kept between the two.
        assert [sharded[f"gather {block}"] // NUM_TRACED_STEPS for block in BLOCKS] == [2, 2, 1]
        assert [sharded[f"wait for gather {block}"] // NUM_TRACED_STEPS for block in BLOCKS] == [2, 2, 1]
        assert [replicated[f"gather gradient {block}"] // NUM_TRACED_STEPS for block in BLOCKS] == [1, 1, 1]
        assert "gather blocks.0" not in replicated
        # Those of collectives that end behind the trace are written into freed memory, as with the gathers of stage 2.
        in_flight = num_ranges(tmp_path / "stage2" / "profile" / f"rank{rank}.json")
        assert not {"gloo:send", "gloo:recv"} & set(in_flight)
