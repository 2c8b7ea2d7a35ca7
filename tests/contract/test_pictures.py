"""The pictures of the docs show what is: scripts draw them again, or a test compares what they are made of."""

import re
from html import unescape
from pathlib import Path

from tests.contract.test_docs import DOCS, script
from tests.zygote.client import Zygote

REPOSITORY = DOCS.parent
IMAGES = DOCS / "images"
draw = script("draw")


def test_the_bars_are_those_of_the_table() -> None:
    assert (IMAGES / "bars.svg").read_text() == draw.bars(), "run: python docs/draw.py bars"


def words_of(svg: str) -> list[str]:
    """The words of a picture in their order, without numbers and their units."""
    text = unescape(" ".join(re.findall(r"<text[^>]*>([^<]*)</text>", svg)))
    return re.findall(r"[A-Za-z_/>]{2,}", text)


def test_the_terminal_has_the_words_of_a_run(tmp_path: Path, zygote: Zygote) -> None:
    """`make train`, cut off after three steps."""
    small = ("launch.nproc_per_node=2", "train.max_steps=3", "hydra.run.dir=outputs/1")
    environment = {"FORCE_COLOR": "1", "COLUMNS": "82", "PYTHONPATH": str(REPOSITORY)}
    ran = zygote.run_python([str(REPOSITORY / "launch.py"), *small], tmp_path, environment)
    assert ran.code == 0, ran.err
    (tmp_path / "out").write_text(ran.out + ran.err)
    shown = words_of((IMAGES / "terminal.svg").read_text())
    assert shown == words_of(draw.terminal(tmp_path / "out")), "run: python docs/draw.py terminal OUTPUT"
    assert len(shown) > 60


def test_the_report_is_of_the_page_as_it_is_now() -> None:
    [made_of] = re.findall(rb"tEXtpage\0([0-9a-f]{64})", (IMAGES / "report.png").read_bytes())
    assert made_of.decode() == draw.sources_of_report(), "run: python docs/draw.py report FOLDER"
