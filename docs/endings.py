"""Writes reference/endings.md from the endings that tests/cluster tries: `python docs/endings.py`."""

import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from tests.cluster.endings import ENDINGS, STARTERS  # noqa: E402

PAGE = REPOSITORY / "docs/reference/endings.md"
HEAD = """# Which exit code does each ending have, and what is left?

`python docs/endings.py` writes this page. Do not edit it. Each cell is a test of `make cluster`, with two ranks in a
job of Slurm, unless the row says otherwise. torchrun ends with 1 where a rank has another code than 0, so a stop gives
it 0. `ended` is `zerotrain ended RUN`, which is the same however the run was started. What to do by the
code: [clusters](../guides/clusters.md).

"""


def page() -> str:
    """The page."""
    lines = [f"| ending | {' | '.join(STARTERS)} | `status` in result.json | `ended` |", "|---|---|---|---|---|---|"]
    for each in ENDINGS:
        codes = ("-" if code is None else str(code) for code in each.codes)
        lines.append(f"| {each.name} | {' | '.join(codes)} | {each.status or 'no file'} | {each.ended} |")
    return HEAD + "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
