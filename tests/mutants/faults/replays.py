"""Faults in replays, and in a stage that is changed since its plan was wrong."""

from tests.mutants.fault import Fault

OF_REPLAY = ("unit/replay/test_replay.py",)
OF_STAGES = ("unit/training/callbacks/test_stages.py",)
OF_TEXT = ("unit/data/test_text.py",)
OF_SPIKES = ("unit/training/figures/test_spikes.py",)

FAULTS = {
    "replay-counts-tokens-from-the-first-document": Fault(
        "data/store/store.py",
        "token {position - documents[number]}",
        "token {position}",
        "a row is told at a place of its file at which it is not",
        OF_TEXT,
    ),
    "spikes-forget-no-step": Fault(
        "training/figures/spikes.py",
        "            del self._sorted[bisect_left(self._sorted, self._in_turn.popleft())]\n",
        "            self._in_turn.popleft()\n",
        "a step is compared with all before it, and memory grows with them",
        OF_SPIKES,
    ),
    "spikes-by-the-range-in-place-of-the-quartiles": Fault(
        "training/figures/spikes.py",
        "self._sorted[count * 3 // 4] - self._sorted[count // 4]",
        "self._sorted[-1] - self._sorted[0]",
        "the first spike hides the next",
        OF_SPIKES,
    ),
    "spike-that-is-not-finite-moves-the-median": Fault(
        "training/figures/spikes.py",
        "isinstance(value, int | float) and isfinite(value)",
        "isinstance(value, int | float)",
        "steps of an infinite loss are what others are compared with",
        OF_SPIKES,
    ),
    "spike-is-told-in-each-step": Fault(
        "training/loggers/record.py",
        "                self._silent_until = run.step + NUM_BEFORE\n",
        "",
        "a loss that stays high fills the terminal",
        OF_REPLAY,
    ),
    "worst-is-the-largest-gradient": Fault(
        "replay/record.py",
        "(found.get(step, 0.0), float(norms[step] or 0.0))",
        "float(norms[step] or 0.0)",
        "--worst is a step at the beginning, where gradients are large, in place of the spike",
        ("unit/replay/test_record.py",),
    ),
    "stage-over-its-memory-stays": Fault(
        "training/callbacks/stages.py",
        "if peak <= budget or",
        "if planned['peak'] <= budget or",
        "a rank that holds more than it may is never noticed",
        OF_STAGES,
    ),
    "stage-forgets-how-wrong-the-plan-was": Fault(
        "training/callbacks/stages.py",
        'nbytes + peak - planned["peak"] <= budget',
        "nbytes <= budget",
        "the run changes to a stage that does not fit either, though another would",
        OF_STAGES,
    ),
    "stage-that-was-changed-is-not-saved": Fault(
        "training/callbacks/stages.py",
        "            self.asked[str(step)] = asked\n",
        "            self._schedule[step] = asked\n",
        "a resume goes on at the stage that did not fit",
        OF_STAGES,
    ),
}
