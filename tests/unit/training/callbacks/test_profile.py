import json
import time

import pytest


def num_traced_steps(folder) -> int:
    events = json.loads((folder / "profile" / "rank0.json").read_text())["traceEvents"]
    return sum(event["name"].startswith("ProfilerStep#") for event in events if event.get("cat") == "user_annotation")


@pytest.mark.parametrize(("max_steps", "num_traced"), [(8, 3), (4, 3), (1, 1)])
def test_three_steps_are_traced_or_all_of_a_run_that_has_no_more(make_trainer, tmp_path, max_steps, num_traced):
    make_trainer(profile=True, max_steps=max_steps).run()
    assert num_traced_steps(tmp_path) == num_traced


class Slow:
    """Items that take a while to read, and draw nothing."""

    draws = False

    def __init__(self, items):
        self.items, self.tokens_per_sequence = items, items.tokens_per_sequence

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        time.sleep(0.002)
        return self.items[index]


def test_rows_are_read_by_another_thread_while_a_step_computes(make_trainer, tmp_path, dataset):
    """Seen in the trace: within a step's interval, beside its forward, on another thread."""
    dataset.train = Slow(dataset.train)
    make_trainer(profile=True, max_steps=8, dataset=dataset).run()
    events = json.loads((tmp_path / "profile" / "rank0.json").read_text())["traceEvents"]
    own = [event for event in events if event.get("cat") == "user_annotation"]
    steps = [event for event in own if event["name"].startswith("ProfilerStep#")]
    reads = [event for event in events if event["name"] == "zerotrain data: read rows"]
    # Not of one step alone: on a busy machine its rows may all be there before it begins (seen 2026-11-22).
    assert any(step["ts"] <= read["ts"] <= step["ts"] + step["dur"] for step in steps for read in reads)
    assert not {read["tid"] for read in reads} & {step["tid"] for step in steps}


def test_without_being_asked_nothing_is_recorded(make_trainer, tmp_path, screen):
    make_trainer().run()
    assert not (tmp_path / "profile").exists()
    assert "memory_snapshot" not in screen.getvalue()


def test_a_memory_snapshot_of_the_cpu_is_said_to_have_no_effect(make_trainer, tmp_path, screen):
    make_trainer(memory_snapshot=True).run()
    assert "warning: train.memory_snapshot=true has no effect on the CPU" in screen.getvalue()
    assert not (tmp_path / "profile").exists()
