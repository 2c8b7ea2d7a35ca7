import pytest

from zerotrain.engine.buckets.life import GRADIENT_TRANSITIONS, WEIGHT_TRANSITIONS, GradientState, Life, WeightState
from zerotrain.errors import EngineStateError


def test_a_written_transition_is_taken_and_any_other_raises_with_both_names() -> None:
    life = Life("weights of wte.weight", WeightState.FULL, WEIGHT_TRANSITIONS)
    life.become(WeightState.SHARD)
    with pytest.raises(EngineStateError, match=r"weights of wte\.weight: cannot go from shard to full"):
        life.become(WeightState.FULL)
    assert life.state is WeightState.SHARD


def test_a_gradient_cannot_be_reduced_before_it_is_filled() -> None:
    life = Life("gradient of wte.weight", GradientState.EMPTY, GRADIENT_TRANSITIONS)
    with pytest.raises(EngineStateError, match="cannot go from empty to reducing"):
        life.become(GradientState.REDUCING)
