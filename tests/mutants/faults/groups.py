"""In groups of the optimizer and freezing from a config."""

from tests.mutants.fault import Fault

STAGES, TRAINED, SCHEMA = "training/callbacks/stages.py", "run/trained.py", "config/schema.py"
OF_RUNS = ("distributed/test_groups_and_freezing.py",)
OF_CHECKS = ("unit/run/preflight/test_check.py",)

FAULTS = {
    "freezing-a-step-too-long": Fault(
        STAGES,
        "if steps is None or step < steps]",
        "if steps is None or step <= steps]",
        "what is frozen until a step trains one step later",
        OF_RUNS,
    ),
    "freezing-begins-behind-the-first-step": Fault(
        STAGES,
        "        self.be_at(run.step)\n\n    def after_step",
        "        pass\n\n    def after_step",
        "the first steps train what the settings freeze",
        OF_RUNS,
    ),
    "freezing-forgotten-by-a-resume": Fault(
        STAGES,
        'self._frozen = state.get("frozen", [])',
        "self._frozen = []",
        "what was frozen when a run was stopped never trains again",
        ("unit/training/callbacks/test_freezing.py",),
    ),
    "freezing-for-good-comes-to-the-engine-late": Fault(
        TRAINED,
        "            each.parameter.requires_grad_(False)\n",
        "            pass\n",
        "a parameter that never trains is planned as one that does",
        ("unit/run/preflight/test_check.py", "distributed/test_groups_and_freezing.py"),
    ),
    "freezing-that-matches-nothing": Fault(
        TRAINED,
        "        problems += unknown\n        until |=",
        "        until |=",
        "a misspelt pattern freezes nothing, and nobody is told",
        OF_CHECKS,
    ),
    "groups-without-their-options": Fault(
        SCHEMA,
        '            | {key: value for key, value in entry.items() if key != "match"}\n',
        "",
        "each group trains with the options of the optimizer",
        OF_RUNS,
    ),
    "groups-with-an-empty-pattern": Fault(
        TRAINED,
        "    if unknown:\n        return unknown\n",
        "",
        "a misspelt pattern beside a right one makes no group, and nobody is told",
        OF_CHECKS,
    ),
    "groups-of-another-run": Fault(
        TRAINED,
        "        _require_same(goes_on_from, made(given))\n",
        "        pass\n",
        "a run goes on with the momentum of a parameter in another group",
        OF_CHECKS,
    ),
}
