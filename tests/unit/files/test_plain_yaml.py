"""Plain values are read, and nothing that stands for more than it says."""

import time
from contextlib import suppress

import pytest
import yaml

from zerotrain.files.untrusted import UntrustedFileError, parse_yaml


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
