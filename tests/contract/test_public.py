"""The names, settings, files and commands that others stand on change only on purpose: `public.txt` keeps them."""

from tests.contract import public
from tests.zygote.client import Zygote


def test_the_public_names_settings_files_and_commands_are_those_that_were_promised(zygote: Zygote):
    promised = [line for line in public.PROMISED.read_text().splitlines() if not line.startswith("#")]
    found = public.lines(zygote)
    assert [line for line in promised if line not in found] == [], "these went: python -m tests.contract.public"
    assert [line for line in found if line not in promised] == [], "these came: python -m tests.contract.public"
    assert found == promised


def test_a_line_keeps_the_comment_above_it_where_its_signature_or_default_is_new():
    promised = ["# head", "== names", "# Since: one", "zerotrain.f(a: int) -> None", "# Since: gone", "zerotrain.g()"]
    lines = ["== names", "zerotrain.e()", "zerotrain.f(b: int) -> None"]
    expected = ["# head", "== names", "zerotrain.e()", "# Since: one", "zerotrain.f(b: int) -> None"]
    assert public.with_comments(lines, promised) == expected
