"""Did you mean: the nearest of the names that exist."""

import difflib
from collections.abc import Iterable


def did_you_mean(name: str, candidates: Iterable[str]) -> str:
    """`"; did you mean X?"` where a candidate is near to `name`, else nothing. Names may be dotted.

    The same one elsewhere comes first (`max_steps` for `train.max_steps`), then one beside `name` (`zero.stge` for
    `zero.stage`), then one anywhere.
    """
    known = sorted(set(candidates))
    parent, _, last = name.rpartition(".")
    beside = {candidate.rpartition(".")[2]: candidate for candidate in known if candidate.rpartition(".")[0] == parent}
    anywhere = {candidate.rpartition(".")[2]: candidate for candidate in known}
    for names, cutoff in ((anywhere, 1.0), (beside, 0.6), (anywhere, 0.7)):
        near = difflib.get_close_matches(last, names, n=1, cutoff=cutoff)
        if near:
            return f"; did you mean {names[near[0]]}?"
    return ""
