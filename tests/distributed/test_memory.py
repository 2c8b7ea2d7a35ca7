"""Promise 2, in memory: at rest the placements' sum, and in a step of stage 3 no more than a few units."""

from collections import Counter
from typing import Any

import pytest
import torch
from cases import Case, batch, build, make_model, micro_batches, place, run_over, train

from zerotrain.settings import ZeroConfig
from zerotrain.sharding.plan import STAGES, Placement


def at_rest(case: Case) -> dict[str, Any]:
    engine = train(case)
    held = engine.memory_bytes()
    padded = sum(bucket.layout.padded_numel for bucket in engine.schedule.buckets)
    return held | {"padded_numel": padded, "numel": engine.num_parameters}


@pytest.mark.parametrize(("precision", "num_ranks"), [("fp32", 3), ("bf16", 2)])
def test_at_rest_a_rank_holds_the_sum_of_its_placements(precision: str, num_ranks: int) -> None:
    itemsize, optimizer_itemsize = {"fp32": (4, 8), "bf16": (2, 12)}[precision]
    cases = [Case(ZeroConfig(stage=stage, bucket_mb=0.05), precision=precision) for stage in range(4)]
    for plan, by_rank in zip(STAGES, run_over(cases, at_rest, num_ranks), strict=True):
        for held in by_rank:

            def share(placement: Placement) -> int:
                return num_ranks if placement is Placement.SHARDED else 1

            padded, numel = held["padded_numel"], held["numel"]
            assert held["parameters"] == padded * itemsize // share(plan.parameters)
            assert held["gradients"] == padded * itemsize // share(plan.gradients)
            assert held["optimizer"] == padded * optimizer_itemsize // share(plan.optimizer)
            assert held["theory"] == {
                "parameters": round(numel * itemsize / share(plan.parameters)),
                "gradients": round(numel * itemsize / share(plan.gradients)),
                "optimizer": round(numel * optimizer_itemsize / share(plan.optimizer)),
                "offloaded": 0,
            }
            for kind, theory in held["theory"].items():
                assert theory <= held[kind] <= 1.03 * theory


def full_bytes_while_running(case: Case) -> dict[str, int]:
    """The most full weights alive in each phase, seen from within every linear layer of the blocks."""
    rank, size = place()
    model = make_model()
    engine = build(case, model)
    shards = sum(bucket.weights.shard.nbytes for bucket in engine.schedule.buckets)
    head = {id(bucket) for bucket in engine.schedule.units[0].buckets}
    most: Counter[str] = Counter()

    def look(*_: Any) -> None:
        phase = engine.schedule.phase.value
        full = sum(b.weights.model_weight.held_nbytes for b in engine.schedule.buckets if id(b) not in head)
        most[phase] = max(most[phase], full)

    for module in model.blocks.modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(look)
            module.register_full_backward_hook(look)
    for step in range(2):
        engine.train_step(micro_batches(batch(step, size, 1), rank))
    unit = max(sum(bucket.layout.padded_numel for bucket in unit.buckets) for unit in engine.schedule.units[1:])
    held = engine.memory_bytes()
    return {
        **most,
        "unit": unit * 4,
        "scratch": held["scratch"],
        "at_rest_beyond_shards": held["parameters"] - shards,
        "num_units": len(engine.schedule.units),
    }


def test_stage_3_keeps_two_units_full_in_forward_and_two_and_a_gradient_in_backward() -> None:
    cases = [Case(ZeroConfig(stage=3, bucket_mb=0.3, prefetch=prefetch)) for prefetch in (0, 1)]
    by_prefetch = enumerate(run_over(cases, full_bytes_while_running, 2))
    for prefetch, seen in ((prefetch, seen) for prefetch, by_rank in by_prefetch for seen in by_rank):
        assert seen["num_units"] == 4
        assert seen["forward"] == (1 + prefetch) * seen["unit"]
        assert seen["unit"] <= seen["backward"] <= 2 * seen["unit"]
        # Two reductions under way, each with what is sent and what is received.
        assert seen["scratch"] <= 4 * seen["unit"]
        assert seen["at_rest_beyond_shards"] == 0
