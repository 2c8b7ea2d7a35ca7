"""A hook of mkdocs: links out of docs/, as GitHub follows them, lead to the repository, or are text without its URL."""

import posixpath
import re
from typing import Any

LINK = re.compile(r"\[([^\]]+)\]\((\.\./[^)\s]+)\)")


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """The text of a page with such links replaced."""
    folder = posixpath.join("docs", posixpath.dirname(page.file.src_uri))
    repository = (config.repo_url or "").rstrip("/")

    def replaced(link: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(folder, link[2]))
        if path.startswith("docs/"):
            return link[0]
        if repository:
            return f"[{link[1]}]({repository}/blob/main/{path})"
        return f"{link[1]} (`{path.partition('#')[0]}`)"

    return LINK.sub(replaced, markdown)
