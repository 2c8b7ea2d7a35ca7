"""YAML of files that somebody else may have written: texts, numbers, true, false and null in lists and mappings.

No anchors and aliases, of which nine lines can stand for a billion values, and no tags, of which some build objects.
"""

from typing import Any

import yaml

from zerotrain.files.untrusted import MAX_DEPTH, MAX_DIGITS, UntrustedFileError

_KINDS = ("str", "int", "float", "bool", "null", "seq", "map")


class _PlainLoader(yaml.SafeLoader):
    """Refuses all else. A date is a text."""

    yaml_implicit_resolvers = {  # noqa: RUF012 - as the class has it
        first: [(tag, pattern) for tag, pattern in each if tag.rpartition(":")[2] in _KINDS]
        for first, each in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.peek_event()
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None) is not None:
            raise UntrustedFileError(f"line {event.start_mark.line + 1} has an anchor (&) or an alias (*)")
        if getattr(event, "tag", None) is not None:
            raise UntrustedFileError(f"line {event.start_mark.line + 1} has a tag (!)")
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise UntrustedFileError(f"its lists and mappings are nested more than {MAX_DEPTH} deep")
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for number, key in enumerate(keys):
            if isinstance(key, list | dict):
                raise UntrustedFileError("a key is a list or a mapping")
            if key in keys[:number]:
                raise UntrustedFileError(f"{key} is there twice")
        return super().construct_mapping(node, deep=deep)


def _construct_short_int(loader: _PlainLoader, node: Any) -> int:
    """Such as 0xff or 1:59:59; one that no float holds is refused, as in JSON."""
    value: int = loader.construct_yaml_int(node)
    if abs(value) >= 10**MAX_DIGITS:
        raise UntrustedFileError(f"it has a whole number of more than {MAX_DIGITS} digits")
    return value


_PlainLoader.add_constructor("tag:yaml.org,2002:int", _construct_short_int)


def parse_yaml(content: bytes) -> Any:
    """The content of a YAML file; None if it is empty.

    Raises:
        UntrustedFileError: it is no such YAML.
    """
    try:
        return yaml.load(content.decode(), _PlainLoader)
    except UntrustedFileError:
        raise
    except Exception as error:  # whatever pyyaml raises: ValueError of `0b_`, IndexError, RecursionError
        raise UntrustedFileError(" ".join(str(error).split()) or type(error).__name__) from None
