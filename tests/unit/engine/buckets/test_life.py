import pytest

from zerotrain.engine.buckets.life import WEIGHT_TRANSITIONS, Life, WeightState
from zerotrain.errors import EngineStateError


def test_a_written_transition_is_taken_and_any_other_raises_with_both_names():
    life = Life("weights of wte.weight", WeightState.FULL, WEIGHT_TRANSITIONS)
    life.become(WeightState.SHARD)
    with pytest.raises(EngineStateError, match=r"weights of wte\.weight: cannot go from shard to full"):
        life.become(WeightState.FULL)
    assert life.state is WeightState.SHARD
