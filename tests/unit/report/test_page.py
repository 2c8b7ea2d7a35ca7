"""The page: well formed, without a request to anywhere, whatever lies in the folders, and small."""

import json
import math
import re
from base64 import b64decode
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np
import pytest

from tests.unit.report.folders import journal, refused, write_job
from zerotrain.report.page import page_of
from zerotrain.report.rows import read_report

POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
VOID = {"meta", "input"}
REFERENCES = {"src", "href", "action", "data", "srcset", "poster", "formaction", "background", "xlink:href"}
NASTY = "</script></title><script>alert(1)</script><img src=x onerror=alert(1)>\"'\u202e\x1b[2J&"


class Page(HTMLParser):
    """The elements and the texts of a page; fails where a tag is not closed in its turn."""

    def __init__(self, content: bytes) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self.open: list[str] = []
        self.feed(content.decode())
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        assert len(dict(attributes)) == len(attributes)
        self.elements.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append((self.open[-1] if self.open else "", data))

    def all(self, tag: str) -> list[dict[str, str | None]]:
        """The attributes of each element of a kind."""
        return [attributes for name, attributes in self.elements if name == tag]

    def text(self) -> str:
        """All that is to be read."""
        return " ".join(data for tag, data in self.texts if tag not in ("script", "style"))


def read(folder: Path) -> Page:
    return Page(page_of(read_report(folder)))


def require_sound(page: Page) -> None:
    """Every id is there once, every `for` and `#` leads to one, nothing is asked of anybody, no handler is inline."""
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(set(ids)) == len(ids)
    for _, attributes in page.elements:
        assert not any(name.startswith("on") for name in attributes)
        for name in REFERENCES & attributes.keys():
            reference = str(attributes[name])
            assert reference.removeprefix("#") in ids or re.fullmatch(r"\./[\w%./~-]+/", reference, re.ASCII)
    assert {tag for tag, _ in page.elements} & {"link", "iframe", "img", "object", "embed", "base", "form"} == set()
    own = "".join(data for tag, data in page.texts if tag in ("script", "style"))
    assert re.findall(r"url\(|@import|https?:|fetch|XMLHttp|eval|innerHTML|import\(", own) == []
    assert [each["content"] for each in page.all("meta") if each.get("http-equiv")] == [POLICY]


@pytest.fixture(scope="module")
def eight(tmp_path_factory: pytest.TempPathFactory) -> Page:
    """The page of eight jobs that ended in different ways."""
    folder = tmp_path_factory.mktemp("eight")
    for place, loss in enumerate((3.0, 2.0, 2.5, 2.75, 2.25)):
        sha256 = "ab"[place % 2] * 64
        overrides = [f"optimizer.lr=0.{place + 1}", f"seed={place}"]
        write_job(folder / str(place), overrides, losses=[5.0, 4.0, loss], final_val_loss=loss, weights_sha256=sha256)
    write_job(folder / "5", ["optimizer.lr=0.6"], losses=[5.0, None], final_val_loss=None, weights_sha256=None)
    write_job(folder / "6", ["optimizer.lr=0.7"], status="failed", error="the disk is full\nmore", weights_sha256=None)
    refused(folder / "7", ["zero.stage=5"], "zero.stage: got 5")
    return read(folder)


def test_the_page_is_sound_and_has_its_sections_and_heads(eight: Page):
    require_sound(eight)
    ids = [each["id"] for each in eight.all("section")]
    assert ids == ["loss", "jobs", "failed", "memory", "sent", "time", "weights"]
    heads = [data for tag, data in eight.texts if tag == "button"]
    # A phone shows the first columns.
    assert (heads[:3], {*heads[3:5]}) == (["job", "val loss", "lr"], {"stage", "seed"})
    assert {"status", "val loss", "tokens/s", "ms/step", "memory", "peak", "sent/step", "weights"} <= set(heads)


def test_the_table_has_a_row_a_job_of_which_one_is_100_and_one_the_best(eight: Page):
    rows = [each for each in eight.all("tr") if "data-j" in each]
    assert [each["data-j"] for each in rows] == list("01234567")
    assert [each["data-j"] for each in rows if each.get("class") == "best"] == ["1"]
    checked = [each["value"] for each in eight.all("input") if each.get("name") == "reference" and "checked" in each]
    assert checked == ["0"]
    ratios = [data for tag, data in eight.texts if tag == "i"]
    assert ratios[:8:1].count("1.00") >= 5
    assert "0.67" in ratios  # 2.0 / 3.0


def test_causes_and_commands_of_what_did_not_complete_and_groups_of_weights_are_told(eight: Page):
    text = eight.text()
    for words in ("the disk is full", "zero.stage: got 5", "the loss became nan or infinite"):
        assert words in text
    assert "python -m zerotrain zero.stage=5" in text
    assert "more" not in [data for tag, data in eight.texts if tag == "p"]
    assert "5 jobs have 2 different weights, bit for bit." in text, "no job is alone with its own"
    assert " 3 jobs: 0, 2, 4 " in [data for _, data in eight.texts]


def test_a_picture_for_each_loss_of_which_one_is_shown_and_for_each_axis_on_which_it_differs(
    eight: Page, tmp_path: Path
):
    plots = [(each["data-kind"], each["data-x"]) for each in eight.all("figure") if "data-kind" in each]
    assert plots == [(kind, "step tokens train_s") for kind in ("val", "train")]
    axes = [each["data-x"] for each in eight.all("div") if each.get("class") == "below" and "data-x" in each]
    assert axes == 2 * ["step", "tokens", "train_s"]
    for name, speed in (("0", "1"), ("1", "7")):
        path = write_job(tmp_path / name) / "metrics.jsonl"
        path.write_text(path.read_text().replace('"train_s": ', f'"train_s": {speed}'))
    shown = [each["data-x"] for each in read(tmp_path).all("figure") if "data-x" in each]
    assert shown == 2 * ["step tokens", "train_s"]
    switches = {each["value"] for each in eight.all("input") if each.get("name") in ("kind", "x") and "checked" in each}
    assert switches == {"val", "step"}


def test_one_run_is_a_page_without_comparisons(tmp_path: Path):
    page = read(write_job(tmp_path / "run", ["seed=3"]))
    require_sound(page)
    assert [each for each in page.all("input") if each.get("name") == "reference"] == []
    assert "python -m zerotrain seed=3" in page.text()
    assert [each["id"] for each in page.all("section")] == ["loss", "jobs", "memory", "sent", "time", "command"]


def test_the_time_of_a_step_is_told_by_its_parts_where_they_were_measured(tmp_path: Path):
    parts = {"step_ms_median": 100.0, "data_wait_ms": 2.0, "comm_wait_ms": 12.0, "update_ms": 3.0}
    whole = time_of(write_job(tmp_path / "of_cpu", ["seed=3"], **parts))
    assert "100.0 ms, 12.0% communication, 3.0% update, 2.0% data" in whole
    parts_shown = re.findall(r'class="(k\d)" style="width:([.\d]*)%"', whole)
    assert parts_shown == [("k0", "83"), ("k1", "12"), ("k2", "3"), ("k3", "2")]
    of_gpu = time_of(write_job(tmp_path / "of_gpu", ["seed=3"], **parts | {"comm_wait_ms": None, "update_ms": None}))
    assert "100.0 ms, 2.0% data" in of_gpu
    assert "compute, communication, update" in of_gpu
    beyond = time_of(write_job(tmp_path / "beyond", ["seed=3"], **parts | {"comm_wait_ms": 1e9, "update_ms": -5.0}))
    assert "100.0 ms, 100.0% communication<" in beyond


def test_a_note_says_why_bytes_differ_from_the_theory(tmp_path: Path):
    for sent, (less, more) in {300: (0, 0), 200: (1, 0), 600: (0, 1)}.items():
        text = read(write_job(tmp_path / f"{sent}", comm_bytes_per_step={"sent": sent, "theory": 300})).text()
        assert (text.count("It sends less where"), text.count("It sends more where")) == (less, more)
        assert "It holds" not in text


def time_of(folder: Path) -> str:
    """The section of a step's time."""
    [found] = re.findall(r'<section id="time">.*?</section>', page_of(read_report(folder)).decode(), re.DOTALL)
    return str(found)


def test_a_folder_with_nothing_in_its_files_is_a_page(tmp_path: Path):
    (tmp_path / "0").mkdir()
    (tmp_path / "0/metrics.jsonl").touch()
    require_sound(read(tmp_path))
    (tmp_path / "empty").mkdir()
    require_sound(Page(page_of(read_report(tmp_path / "empty"))))


# ---- malice


def test_nothing_out_of_files_is_html_and_all_of_it_can_be_printed(tmp_path: Path):
    name = NASTY.replace("/", "")
    write_job(tmp_path / "0", losses=[5, 4])
    path = write_job(tmp_path / name, [], losses=[5, 3], status="failed", error=NASTY * 3, given=[f"a={NASTY}", NASTY])
    lines = [{"step": step, NASTY: step, "]]>": 1, "__proto__": step, "nan": None, "text": NASTY} for step in (0, 10)]
    with (path / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
    config = path / "config.yaml"
    config.write_text(config.read_text().replace("num_layers: 4", '"<b>\\u202e": "</script><b>"\n  x: .nan'))
    write_job(tmp_path / "2", [], losses=[5, 2], weights_sha256=NASTY, config_hash=NASTY)
    content = page_of(read_report(tmp_path))
    page = Page(content)
    require_sound(page)
    assert (content.count(b"<script"), content.count(b"</script>")) == (2, 2)
    assert {"train_loss", "val_loss", "]]>", "__proto__"} < data_of(page)["curves"].keys()
    assert len(data_of(page)["curves"]) == 7  # with that of the nasty name, of tokens and of seconds
    assert [place for place in links_of(page) if "/" in place.rstrip("/").removeprefix("./")] == []
    assert {unquote(place) for place in links_of(page)} == {"./0/", "./2/", f"./{name}/"}
    assert page.all("b") == [] or all(
        each.keys() <= {"class", "style", "hidden", "aria-hidden"} for each in page.all("b")
    )
    shown = content.decode().split("</style>", 1)[1].split("<script>")[0]
    assert [line for line in shown.split("\n") if not line.isprintable()] == []
    assert "\\u202e" in shown


def data_of(page: Page) -> dict[str, Any]:
    """The curves, as the page's own script reads them."""
    [text] = [data for tag, data in page.texts if tag == "script" and data.startswith('{"names":')]
    return dict(json.loads(text))


def links_of(page: Page) -> list[str]:
    """Where the page links to."""
    return [place for each in page.all("a") if (place := str(each["href"])).startswith("./")]


def values_of(page: Page, name: str, job: int) -> list[tuple[int, float]]:
    """(step, value) of a curve."""
    data = data_of(page)
    curve = data["curves"][name]
    number, text = curve["jobs"][str(job)]
    parts = [code / 65534 if code < 65535 else math.nan for code in np.frombuffer(b64decode(text), "<u2").tolist()]
    values = [curve["low"] + part * (curve["high"] - curve["low"]) for part in parts]
    return list(
        zip(data["steps"][number], [math.exp(value) if curve["log"] else value for value in values], strict=True)
    )


def test_each_metric_is_a_curve_with_its_steps_and_values(tmp_path: Path):
    for job, scale in enumerate((1e-6, 1.0, 300.0)):
        path = write_job(tmp_path / str(job), [f"seed={job}"], losses=[5.0, 4.0, None]) / "metrics.jsonl"
        lines = [{"step": step, "grad_norm": scale * (step + 1), "score": step - 7.5, "one": 2} for step in range(9)]
        path.write_text(path.read_text() + "".join(json.dumps(line) + "\n" for line in lines))
    page = read(tmp_path)
    assert [*data_of(page)["curves"]] == ["val_loss", "train_loss", "grad_norm", "one", "score", "tokens", "train_s"]
    for job, scale in enumerate((1e-6, 1.0, 300.0)):
        expected = [(step, pytest.approx(scale * (step + 1), rel=3e-4)) for step in range(9)]  # over nine decades
        assert values_of(page, "grad_norm", job) == expected
        assert values_of(page, "score", job) == [(step, pytest.approx(step - 7.5, abs=1e-3)) for step in range(9)]
        assert values_of(page, "one", job) == [(step, pytest.approx(2)) for step in range(9)]
        *steps, (last, value) = values_of(page, "train_loss", job)
        assert (steps, last, math.isnan(value)) == ([(0, pytest.approx(5)), (10, pytest.approx(4))], 20, True)


def test_only_a_report_that_is_written_again_follows_itself(tmp_path: Path):
    write_job(tmp_path / "0")
    report = read_report(tmp_path)
    ended, live = (Page(page_of(replace(report, is_live=is_live))) for is_live in (False, True))
    for page, num in ((ended, 0), (live, 1)):
        assert len([each for each in page.all("meta") if each.get("http-equiv") == "refresh"]) == num
        assert len([each for each in page.all("body") if "data-live" in each]) == num


def test_links_lead_from_the_page_to_folders_of_jobs_and_nowhere_else(tmp_path: Path):
    write_job(tmp_path / "sweep/0")
    events = [
        {"event": "ended", "job": job, "folder": folder, "status": "failed"}
        for job, folder in enumerate(("0", "../o", "/"))
    ]
    journal(tmp_path / "sweep", *events)
    write_job(tmp_path / "o")
    assert set(links_of(read(tmp_path / "sweep"))) <= {"./0/", "././"}
    report = read_report(tmp_path / "sweep")
    (tmp_path / "compared").mkdir()
    [link] = {*links_of(Page(page_of(replace(report, place=tmp_path / "compared"))))} - {"./../sweep/"}
    assert (tmp_path / "compared" / link).samefile(tmp_path / "sweep/0")
    assert links_of(Page(page_of(replace(report, place=None)))) == []  # at a URL


def test_an_error_of_a_megabyte_and_numbers_beyond_all_measure_are_short(tmp_path: Path):
    memory = {"parameters": 10**300, "gradients": 1e308, "optimizer": 1e17, "theory": {"parameters": 1e-300}}
    for place in range(3):
        write_job(
            tmp_path / str(place),
            losses=[1e308, -1e308, 1e17, None, 0.0],
            status=("completed", "failed")[place % 2],
            error="x" * 10**6,
            given=["y" * 10**6],
            final_val_loss=-(1e17),
            step_ms_median=1e-300,
            tokens_per_s=0.0,
            memory_bytes=memory,
            comm_bytes_per_step={"sent": 0, "theory": 1e17},
        )
    content = page_of(read_report(tmp_path))
    require_sound(Page(content))
    assert len(content) < 100_000


# ---- 200 jobs


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The page of 200 jobs with eight long curves each, of which no two are equal, and with groups of seeds."""
    folder = tmp_path_factory.mktemp("many")
    for place in range(200):
        overrides = [f"optimizer.lr={place % 7 + 1}e-3", f"zero.stage={place % 4}", f"seed={place // 28}"]
        losses = [5 / (1 + step / 20) + 0.002 * ((37 * place + 11 * step * step) % 101) for step in range(60)]
        lost = {"status": "failed", "error": f"rank {place} failed: {'why ' * 90}"} if place % 9 == 0 else {}
        path = write_job(
            folder / f"{place}",
            overrides,
            losses=losses,
            final_val_loss=losses[-1],
            weights_sha256=f"{place // 2:064}",
            **lost,
        )
        lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
        for line in lines[::2]:  # those of the training
            line |= {f"metric_{number}": (place + number + 7 * line["step"]) % 97 - number for number in range(4)}
        (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return page_of(read_report(folder))


def test_a_page_of_200_jobs_is_under_300_kilobytes_and_sound(many: bytes):
    assert len(many) < 300_000
    page = Page(many)
    require_sound(page)
    assert len([each for each in page.all("tr") if "data-j" in each]) == 200
    curves = data_of(page)["curves"]
    assert (len(curves), {len(curve["jobs"]) for curve in curves.values()}) == (8, {200})
    assert min(len(values_of(page, name, 7)) for name in curves) >= 10
    assert len(links_of(page)) == 200
    assert [each["id"] for each in page.all("section")][:5] == ["loss", "jobs", "failed", "parallel", "seeds"]
    # The best comes first, and the head says so.
    assert next(each for each in page.all("tr") if "data-j" in each)["class"] == "best"
    assert [each["aria-sort"] for each in page.all("th") if "aria-sort" in each] == ["ascending"]
