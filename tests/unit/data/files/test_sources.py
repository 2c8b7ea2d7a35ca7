import json
import os
import sysconfig
from pathlib import Path

import pytest

from zerotrain.data.text_files import Sources, find_sources


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, content in {
        "b.txt": b"bee",
        "a.md": b"ay",
        "deep/er/c.py": b"see",
        "empty.txt": b"",
        "picture.bin": b"\x00\x01",
        ".hidden": b"hidden",
        ".git/config": b"hidden",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    return tmp_path


def names(sources: Sources, folder: Path) -> list[str]:
    return [str(source.relative_to(folder)) for source in sources.files]


def test_a_folder_gives_its_text_files_sorted_without_hidden_empty_and_binary_ones(folder):
    assert names(find_sources(str(folder)), folder) == ["a.md", "b.txt", "deep/er/c.py"]


def test_a_file_gives_itself_whatever_it_holds(folder):
    assert names(find_sources(str(folder / "picture.bin")), folder) == ["picture.bin"]


def test_a_pattern_gives_the_files_that_match_at_any_depth(folder):
    assert names(find_sources(f"{folder}/**/*.py"), folder) == ["deep/er/c.py"]


def test_a_file_whose_name_looks_like_a_pattern_is_that_file(folder):
    (folder / "a[1].txt").write_text("brackets")
    assert names(find_sources(f"{folder}/a[1].txt"), folder) == ["a[1].txt"]


def test_a_tilde_is_the_home_folder(folder, monkeypatch):
    monkeypatch.setenv("HOME", str(folder))
    assert names(find_sources("~/b.txt"), folder) == ["b.txt"]


def test_nothing_given_is_the_standard_library_without_tests_and_other_packages():
    sources = find_sources(None).files
    stdlib = Path(sysconfig.get_path("stdlib"))
    assert stdlib / "argparse.py" in sources
    assert sum(source.stat().st_size for source in sources) > 5_000_000
    assert not {"site-packages", "dist-packages", "test", "tests"} & {
        part for source in sources for part in source.relative_to(stdlib).parts
    }
    assert sources == sorted(sources)


def test_a_missing_path_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"data.path=.*nothing.txt does not exist; give a file, a folder or"):
        find_sources(str(tmp_path / "nothing.txt"))


def test_what_is_neither_a_file_nor_a_folder_is_not_said_to_be_missing(tmp_path):
    os.mkfifo(tmp_path / "text.txt")
    for path in (tmp_path / "text.txt", "/dev/zero"):
        with pytest.raises(FileNotFoundError, match=r"data.path=.* is neither a file nor a folder; give a file"):
            find_sources(str(path))


def test_a_pattern_without_a_match_is_refused(folder):
    with pytest.raises(FileNotFoundError, match=r"\*\.rs matches no file"):
        find_sources(f"{folder}/*.rs")


def test_an_empty_file_or_folder_is_refused(folder):
    (folder / "void").mkdir()
    for path in (folder / "empty.txt", folder / "void"):
        with pytest.raises(ValueError, match=f"data.path={path} holds no text; give a file, folder or pattern"):
            find_sources(str(path))


@pytest.mark.case(
    "data: Text",
    "a glob beside a folder; links to a file that is read",
    "the glob skips the files that the folder skips; a file is read once; one line says what was read and skipped",
)
def test_a_pattern_takes_what_a_folder_takes(folder):
    assert names(find_sources(f"{folder}/*"), folder) == ["a.md", "b.txt"]


@pytest.mark.case("data: Text", "a glob beside a folder; links to a file that is read")
def test_what_was_taken_and_left_is_told_in_one_line(folder):
    (folder / "link.txt").symlink_to(folder / "b.txt")
    (folder / "again.txt").hardlink_to(folder / "b.txt")
    (folder / "gone.txt").symlink_to(folder / "nothing")
    assert str(find_sources(str(folder))) == (
        f"data.path={folder}: reads 3 files (1 .md, 1 .txt, 1 .py); leaves out 1 binary, 1 empty, 1 hidden, 2 links to "
        "files that are read, 1 links to nothing and other files that hold no text"
    )


@pytest.mark.case("data: Text", "a glob beside a folder; links to a file that is read")
@pytest.mark.parametrize("path", ["", "*", "**/*"])
def test_a_file_is_read_once_whatever_links_lead_to_it(folder, path: str):
    before = names(find_sources(str(folder / path)), folder)
    (folder / "z.txt").symlink_to(folder / "b.txt")
    (folder / "zz.md").hardlink_to(folder / "a.md")
    assert names(find_sources(str(folder / path)), folder) == before


def run_in(folder: Path, *, lock: bool) -> None:
    """What a run has in its folder, on the machine that started it and on another."""
    (folder / "ranks").mkdir(parents=True)
    (folder / "config.yaml").write_text("seed: 1")
    (folder / "ranks/0.log").write_text("step 1")
    if lock:
        (folder / ".lock").write_text(json.dumps({"pid": 1, "host": "here", "started": "now"}) + "\n")


@pytest.mark.case("data: Text", "`data.path=.` with the outputs of this run and others, or the cache, in it")
@pytest.mark.parametrize("path", ["", "**/*"])
def test_the_folders_of_runs_and_of_the_cache_are_left_out(folder, path: str):
    before = names(find_sources(str(folder / path)), folder)
    run_in(folder / "outputs/day/time", lock=True)
    run_in(folder / "outputs/day/of another machine", lock=False)
    (folder / "multirun/day").mkdir(parents=True)
    (folder / "multirun/day/multirun.yaml").write_text("hydra: 1")
    (folder / "cache").mkdir()
    (folder / "cache/kept.txt").write_text("kept")
    sources = find_sources(str(folder / path), without=[folder / "cache"])
    assert names(sources, folder) == before
    assert sum(count for reason, count in sources.left.items() if "of runs and caches" in reason) >= 4


@pytest.mark.case(
    "data: Text",
    "`data.path=.` with the outputs of this run and others, or the cache, in it",
    "skipped; the check sees the files that the ranks read",
)
def test_at_the_moment_a_run_is_checked_its_folder_is_known_too(folder):
    """It holds nothing yet but its lock: what is read then is what the ranks read later."""
    own = folder / "outputs/now"
    own.mkdir(parents=True)
    (own / ".lock").write_text(json.dumps({"pid": os.getpid(), "host": "here", "started": "now"}))
    before = names(find_sources(str(folder)), folder)
    run_in(own / "more", lock=False)
    (own / "config.yaml").write_text("seed: 1")
    assert names(find_sources(str(folder)), folder) == before


def test_a_lock_of_something_else_is_no_run(folder):
    (folder / "deep/.lock").write_text("12345")
    assert "deep/er/c.py" in names(find_sources(str(folder)), folder)


def test_a_folder_of_runs_is_read_where_it_is_what_was_named(folder):
    run_in(folder / "run", lock=True)
    assert names(find_sources(str(folder / "run")), folder) == ["run/config.yaml", "run/ranks/0.log"]
    assert names(find_sources(str(folder / "run/*.yaml")), folder) == ["run/config.yaml"]
