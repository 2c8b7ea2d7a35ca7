import json

import pytest


@pytest.mark.parametrize(("max_steps", "num_traced"), [(8, 3), (4, 3), (1, 1)])
def test_three_steps_are_traced_or_all_of_a_run_that_has_no_more(make_trainer, tmp_path, max_steps, num_traced):
    make_trainer(profile=True, max_steps=max_steps).run()
    events = json.loads((tmp_path / "profile/rank0.json").read_text())["traceEvents"]
    own = [event["name"] for event in events if event.get("cat") == "user_annotation"]
    assert sum(name.startswith("ProfilerStep#") for name in own) == num_traced


def test_a_memory_snapshot_of_the_cpu_is_said_to_have_no_effect(make_trainer, tmp_path, screen):
    make_trainer(memory_snapshot=True).run()
    assert "warning: train.memory_snapshot=true has no effect on the CPU" in screen.getvalue()
    assert not (tmp_path / "profile").exists()
