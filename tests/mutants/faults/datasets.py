"""In what reads users' datasets and mixes them."""

from tests.mutants.fault import Fault

FETCH, ITEMS, MIX, EVALUATION = (
    "data/reading/fetch.py",
    "data/reading/items.py",
    "data/mix.py",
    "training/callbacks/evaluation.py",
)
OF_FETCH, OF_MIX = ("unit/data/reading/test_fetch.py",), ("unit/data/test_mix.py",)
OF_ITEMS = ("unit/data/reading/test_items.py",)

FAULTS = {
    "row-drawn-alike-in-each-epoch": Fault(
        FETCH,
        'seed_by("row", seed, epoch, row)',
        'seed_by("row", seed, row)',
        "each epoch has the same augmentation",
        OF_FETCH,
    ),
    "row-seeds-left-behind": Fault(
        FETCH,
        "        random.setstate(states[1])\n",
        "",
        "what is drawn beside a dataset depends on how often it is read",
        OF_FETCH,
    ),
    "drawing-collate-in-a-thread": Fault(
        FETCH,
        '    return of_items or (collate is not None and bool(getattr(collate, "draws", True)))\n',
        "    return of_items\n",
        "a collate function that masks at random is run beside the model, whose dropout it changes",
        OF_FETCH,
    ),
    "mix-order-of-one-seed": Fault(
        MIX,
        "seed=_seed_of(names[source], seed)",
        "seed=0",
        "a source is read in the same order whatever the seed",
        OF_MIX,
    ),
    "mix-source-numbered-by-places": Fault(
        MIX,
        "numbers = patterns * self._counts[which] + self._number_at[places]",
        "numbers = patterns * len(self._source_at) + self._number_at[places]",
        "rows of a source are left out",
        OF_MIX,
    ),
    "mix-pattern-in-blocks": Fault(
        MIX,
        "    return sources[evenly], numbers[evenly]\n",
        "    return sources, numbers\n",
        "a mix reads all of one source, then all of the next",
        OF_MIX,
    ),
    "tokens-per-sequence-believed": Fault(
        ITEMS,
        "        if told is not None and num_labels(batch, num_rows=1) != told:\n",
        "        if False:\n",
        "losses are weighed by a number that is wrong",
        OF_ITEMS,
    ),
    "modules-put-into-training": Fault(
        EVALUATION,
        "            module.training = mode\n",
        "            module.training = True\n",
        "an evaluation turns on the batch norms of a frozen backbone",
        ("unit/training/callbacks/test_evaluation.py",),
    ),
}
