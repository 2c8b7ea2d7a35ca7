from torch.profiler import ProfilerActivity, profile

from zerotrain.engine.ranges import named_range


def test_a_range_is_named_while_a_profiler_runs_and_costs_nothing_else():
    assert named_range("gather", "blocks.0") is named_range("reduce", "blocks.1")
    with profile(activities=[ProfilerActivity.CPU]) as profiler, named_range("gather", "blocks.0"):
        pass
    assert [event.name for event in profiler.events()] == ["gather blocks.0"]
    assert named_range("gather", "blocks.0") is named_range("reduce", "blocks.1")
