"""The site of docs/: every page stands in its navigation once, and links that leave docs/ lead to the repository."""

from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from tests.contract.test_docs import DOCS, REPOSITORY, script


class SiteLoader(yaml.SafeLoader):
    """Reads mkdocs.yml, whose own tags mkdocs and Python-Markdown resolve."""


SiteLoader.add_multi_constructor("", lambda loader, suffix, node: suffix)
SITE = yaml.load((REPOSITORY / "mkdocs.yml").read_text(), SiteLoader)


def pages_in(entry: Any) -> Iterator[str]:
    if isinstance(entry, str):
        yield entry
    else:
        for part in entry.values() if isinstance(entry, dict) else entry:
            yield from pages_in(part)


def test_every_page_stands_in_the_navigation_once():
    pages = Counter(pages_in(SITE["nav"]))
    assert [page for page, times in pages.items() if times > 1] == []
    assert pages.keys() == {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")}


def test_the_site_loads_nothing_from_other_hosts():
    assert SITE["theme"]["font"] is False
    assert SITE["plugins"] == ["search"]
    assert "extra_javascript" not in SITE
    assert all((DOCS / path).is_file() and "url(" not in (DOCS / path).read_text() for path in SITE["extra_css"])
    assert all((REPOSITORY / path).is_file() for path in SITE["hooks"])


@pytest.mark.parametrize(
    ("page", "link", "there", "without"),
    [
        ("guides/own_loop.md", "[pretrain](../../examples/pretrain.py)", "examples/pretrain.py", "pretrain"),
        ("index.md", "[how](../CONTRIBUTING.md#commits)", "CONTRIBUTING.md#commits", "how"),
        ("reference/cases/data.md", "[bits](../bits.md)", None, None),
        ("guides/stop.md", "[resume](resume.md)", None, None),
    ],
)
def test_a_link_out_of_docs_leads_to_the_repository_or_is_text(page: str, link: str, there: str | None, without: str):
    replaced = script("outside").on_page_markdown
    place = SimpleNamespace(file=SimpleNamespace(src_uri=page))
    with_url = replaced(f"See {link}.", page=place, config=SimpleNamespace(repo_url="https://host/zerotrain/"))
    without_url = replaced(f"See {link}.", page=place, config=SimpleNamespace(repo_url=""))
    if there is None:
        assert with_url == without_url == f"See {link}."
    else:
        assert with_url == f"See [{without}](https://host/zerotrain/blob/main/{there})."
        assert without_url == f"See {without} (`{there.partition('#')[0]}`)."
