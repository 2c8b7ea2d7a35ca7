"""A text as a terminal and a log can take it."""

_NUM_SHOWN = 2000
_NUM_SHOWN_OF_END = 300


def printable(text: str, max_length: int = _NUM_SHOWN, *, keep: str = "\n\t") -> str:
    """Escape each character that cannot be printed, and leave out the middle of a long text.

    An exception's text may hold a tensor, a file of 5 MB, colours, or halves of characters that no encoding has.

    Args:
        max_length: characters that are shown.
        keep: what stays though it cannot be printed.
    """
    if len(text) > max_length:
        num_left_out = len(text) - max_length
        start, end = text[: max_length - _NUM_SHOWN_OF_END], text[-_NUM_SHOWN_OF_END:]
        text = f"{start} [... {num_left_out} characters ...] {end}"
    return "".join(each if each.isprintable() or each in keep else _escaped(each) for each in text)


def duration(seconds: float) -> str:
    """A time to wait in one or two units, such as 40 s, 12 min or 2 h 5 min."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min"


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode()
