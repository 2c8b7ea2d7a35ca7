import sysconfig
from pathlib import Path

import pytest

from zerotrain.data.sources import find_sources


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


def names(sources: list[Path], folder: Path) -> list[str]:
    return [str(source.relative_to(folder)) for source in sources]


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
    sources = find_sources(None)
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


def test_a_pattern_without_a_match_is_refused(folder):
    with pytest.raises(FileNotFoundError, match=r"\*\.rs matches no file"):
        find_sources(f"{folder}/*.rs")


def test_an_empty_file_or_folder_is_refused(folder):
    (folder / "void").mkdir()
    for path in (folder / "empty.txt", folder / "void"):
        with pytest.raises(ValueError, match=f"data.path={path} holds no text; give a file, folder or pattern"):
            find_sources(str(path))
