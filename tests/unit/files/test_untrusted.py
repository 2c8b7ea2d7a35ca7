import json
import os
import stat
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypedDict

import pytest
import yaml

from zerotrain.files.untrusted import (
    MAX_DEPTH,
    MAX_DIGITS,
    FileName,
    FilePath,
    Natural,
    NotRegularError,
    Shape,
    UntrustedFileError,
    is_kind,
    one_of,
    only_new,
    only_regular,
    parse_json,
    parse_yaml,
    read_regular,
    require_kind,
)


class Inner(TypedDict):
    b: list[str]


class Outer(TypedDict):
    a: Inner


class Step(TypedDict, total=False):
    step: Natural


@dataclass(frozen=True)
class Note:
    step: Natural
    ranks: tuple[int, ...] = ()


Word = Annotated[str, one_of("a", "b.c")]


def test_a_file_is_read_up_to_its_limit_and_not_beyond(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"0123456789")
    assert read_regular(path, max_nbytes=10) == b"0123456789"
    with pytest.raises(UntrustedFileError, match="more than the 9 bytes"):
        read_regular(path, max_nbytes=9)
    os.truncate(path, 1 << 40)  # a sparse terabyte is refused by its size, before a byte is read
    with pytest.raises(UntrustedFileError, match="more than the"):
        read_regular(path, max_nbytes=1 << 20)


def test_a_file_that_does_not_tell_its_size_is_read_up_to_the_limit():
    said = read_regular("/proc/self/status", max_nbytes=1 << 20)
    assert said.startswith(b"Name:")
    with pytest.raises(UntrustedFileError, match="more than the 10 bytes"):
        read_regular("/proc/self/status", max_nbytes=10)


@pytest.mark.parametrize("opening", ["[", '{"a":', '{"[":['])
def test_what_is_nested_too_deeply_is_refused_in_one_line(opening):
    for depth in (MAX_DEPTH + 1, 2_000, 200_000):
        with pytest.raises(UntrustedFileError, match="deep"):
            parse_json(opening * depth, Any)


def test_brackets_within_texts_are_not_depth():
    text = "[" * 5_000 + '"\\' + "{" * 5_000
    assert parse_json(json.dumps({text: [text]}), Any) == {text: [text]}


@pytest.mark.parametrize("text", [b"", b"{", b"\xff", b'{"a": 1', b'{"a": 01}', b"[1," * 30, b'"' + b"\\" * 9])
def test_what_is_no_json_is_refused_in_one_printable_line(text):
    with pytest.raises(UntrustedFileError, match="it is no JSON") as refused:
        parse_json(text, Any)
    assert str(refused.value).isprintable()


@pytest.mark.parametrize("text", ['{"step": %s}', '{"other": [%s]}', '{"step": -%s}'])
def test_no_number_is_read_that_no_float_holds(text):
    assert parse_json(text % ("0" if "step" in text else "9" * MAX_DIGITS), dict[str, Any])
    with pytest.raises(UntrustedFileError, match="it has a whole number of more than 300 digits"):
        parse_json(text % ("9" * (MAX_DIGITS + 1)), dict[str, Any])


def test_a_row_of_data_may_have_any_number_that_python_reads():
    assert parse_json(json.dumps({"text": "a", "id": 10**400}), Any)["id"] == 10**400


@pytest.mark.parametrize(
    ("kind", "value", "read"),
    [
        (int, 3, 3),
        (float, 3, 3.0),
        (str | None, None, None),
        (Any, {"anything": [1]}, {"anything": [1]}),
        (Step, {"step": 1, "other keys": "pass"}, {"step": 1}),
        (Step, {}, {}),
        (Note, {"step": 1, "ranks": [2, 3], "other": 4}, Note(1, (2, 3))),
        (list[Natural], [0, 5], [0, 5]),
        (dict[str, FileName], {"x": "rank-0.bin"}, {"x": "rank-0.bin"}),
        (list[FilePath], ["a", "a/b.txt", ".a/b"], ["a", "a/b.txt", ".a/b"]),
        (dict[int, str], {"1": "a"}, {1: "a"}),
        (Word, "b.c", "b.c"),
        (Shape, [3, 0], (3, 0)),
    ],
)
def test_what_is_of_a_kind_is_read_as_one(kind, value, read):
    assert require_kind(value, kind) == read
    assert is_kind(value, kind)


@pytest.mark.parametrize(
    ("kind", "value", "says"),
    [
        (int, True, "^got True; it must be a whole number$"),
        (str | None, 1, "^got 1; it must be a text or null$"),
        (Outer, {}, "^a is missing$"),
        (Outer, {"a": {"b": ["x", 1]}}, r"^a\.b\[1\]: got 1; it must be a text$"),
        (Step, {"step": "1"}, "^step: got '1'; it must be a whole number$"),
        (Step, None, "^got null; it must be a mapping$"),
        (Natural, -1, "^got -1; it must be a whole number >= 0$"),
        (Natural, 2**63, "^got 9223372036854775808; it must be a whole number <= 9223372036854775807$"),
        (Word, "bxc", "^got 'bxc'; it must be one of a, b.c$"),
        (dict[str, Word], {"a.b[2]": "c"}, r"^\[...\]: it must be one of a, b.c$"),
        (dict[int, str], {"a": "b"}, "^got a text; it must be a whole number$"),
        (Annotated[str, one_of("a-b")], "a", "^got 'a'; it must be a-b$"),
        (int | float | None, "x", "^got 'x'; it must be a number or null$"),
        (str, ["\x1b[31m" * 99], "^got a list; it must be a text$"),
        (float, 10**400, "number out of range"),
        (Shape, [2**40, 2**40], "must be a list of lengths"),
        (Shape, [-1], "must be a list of lengths"),
        (dict[str, Shape], {"x": [True]}, "it must be a list of lengths"),
        (list[FileName], ["a", "\x1b[2J" * 99], r"\[1\]: got .*x1b.*; it must be the name of a file in this folder"),
    ],
)
def test_what_is_of_another_kind_is_refused_with_its_place(kind, value, says):
    with pytest.raises(UntrustedFileError, match=says) as refused:
        require_kind(value, kind)
    assert str(refused.value).isprintable()
    assert len(str(refused.value)) < 400


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "../x", "a/b", "/etc/passwd", "a\\b", "a\0", "a\nb", "\x1b[2J", "\u00e9" * 128, "\ud800", 3, ["x"]],
)
def test_a_name_that_leaves_the_folder_is_no_name(name):
    with pytest.raises(UntrustedFileError, match="must be the name of a file in this folder"):
        require_kind(name, FileName)


@pytest.mark.parametrize(
    "name", ["a/../b", "../a", "/a", "a//b", "a/", "", ".", "a/./b", "a\x1b/b", "a\0", 3, ["a"], None]
)
def test_a_path_that_leads_out_of_its_folder_or_cannot_be_shown_is_none(name):
    assert not is_kind(name, FilePath)


# Plain values are read, and nothing that stands for more than it says.


@pytest.mark.parametrize(
    "text",
    ["", "a: 1\nb: [x, 2.5, null, true, {c: no}]\n", "- 1e+3\n- .inf\n- 0x1f\n- 'it''s'\n- \"\\u00e9\"\n", "x", "3"],
)
def test_plain_values_are_what_they_are_in_any_yaml(text: str):
    assert parse_yaml(text.encode()) == yaml.safe_load(text)


def test_a_date_is_a_text_and_merge_and_value_keys_are_none():
    assert parse_yaml(b"a: 2026-11-23\n<<: 1\n=: 2\n") == {"a": "2026-11-23", "<<": 1, "=": 2}


REFUSED = [
    b"a: &x 1", b"*x", b"&x [*x]", b"!!int 3", b"!x y", b"a: !!binary aGk=", b"a: 0x_", b"a: 0b_", b"[" * 2000,
    b"- " * 999, b"{a: " * 500, b"? " * 500, b"a: 1\na: 1", b"[]: 1", b"a: [", b"'", b"\xff", b"\x00",
    b"%YAML 2.0\n--- 1", b"a: 1\n--- 2",
    b"a: " + b"9" * 400,
    b"a: 0x" + b"f" * 5000,
    b"[1" + b":59" * 300 + b"]",
]  # fmt: skip
PIECES = ["[", "- ", "a: ", "? ", "{a: ", "[],", "'", '"\\', "k: v\n", "#\n", "|\n ", "&a ", "*a "]


@pytest.mark.parametrize("content", REFUSED)
def test_all_else_is_refused_in_one_line(content: bytes):
    with pytest.raises(UntrustedFileError) as error:
        parse_yaml(content)
    assert str(error.value).isprintable()


@pytest.mark.parametrize("piece", PIECES)
def test_a_file_of_64_kb_is_done_with_in_bounded_time(piece: str):
    begun_s = time.process_time()
    with suppress(UntrustedFileError):
        parse_yaml((piece * 65536)[:65536].encode())
    assert time.process_time() - begun_s < 20


# Only regular files are opened, and nothing else in their place stops anybody.


MODES = {"r": os.O_RDONLY, "w": os.O_WRONLY | os.O_CREAT | os.O_TRUNC, "a+": os.O_RDWR | os.O_CREAT | os.O_APPEND}
"""As Python's `open` passes them."""
MAKE = {
    "a FIFO": os.mkfifo,
    "a folder": os.mkdir,
    "a socket": lambda path: os.mknod(path, stat.S_IFSOCK | 0o600),
    "a device": lambda path: os.symlink("/dev/null", path),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", MAKE)
def test_what_is_no_file_is_refused_at_once_and_stays(tmp_path: Path, kind: str, mode: str):
    MAKE[kind](tmp_path / "it")
    before, num_open = os.lstat(tmp_path / "it"), len(os.listdir("/proc/self/fd"))
    with pytest.raises(NotRegularError, match=f"it is {kind}, and must be a regular file") as error:
        os.close(only_regular(tmp_path / "it", MODES[mode]))
    assert error.value.filename == str(tmp_path / "it")
    assert (os.lstat(tmp_path / "it").st_ino, os.lstat(tmp_path / "it").st_mode) == (before.st_ino, before.st_mode)
    assert len(os.listdir("/proc/self/fd")) == num_open


LAY = {
    "nothing": lambda path: None,
    "a file": lambda path: path.write_text("much that was there"),
    "a FIFO": os.mkfifo,
    "a link": lambda path: path.symlink_to("mine"),
}


@pytest.mark.parametrize("kind", LAY)
def test_a_temporary_file_is_new_whatever_lay_there(tmp_path: Path, kind: str):
    (tmp_path / "mine").write_text("kept")
    path = tmp_path / "it"
    LAY[kind](path)
    with open(path, "w", opener=only_new) as file:
        file.write("new")
    assert (path.read_text(), path.is_symlink()) == ("new", False)
    assert (tmp_path / "mine").read_text() == "kept"
