"""What rank 0 prints reaches the terminal and its log; what is drawn for a terminal only stays there."""

import io

from rich.console import Console
from rich.progress import Progress

from zerotrain.launching.worker import TerminalAndFile


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_a_line_goes_to_both_and_whole_where_it_comes_in_pieces():
    terminal, file = io.StringIO(), io.StringIO()
    both = TerminalAndFile(terminal, file)
    print("loss", end=" ", file=both)
    assert file.getvalue() == ""
    print(2.5, file=both)
    assert terminal.getvalue() == file.getvalue() == "loss 2.5\n"
    assert TerminalAndFile(Terminal(), io.StringIO()).isatty()
    assert not both.isatty()


def test_a_progress_bar_and_colours_are_drawn_on_the_terminal_and_leave_the_log_alone():
    terminal, file = Terminal(), io.StringIO()
    both = TerminalAndFile(terminal, file)
    console = Console(file=both, force_terminal=True, width=80, color_system="standard")
    with Progress(console=console) as progress:
        task = progress.add_task("training", total=2)
        progress.advance(task)
        progress.refresh()
    console.print("[red]done[/red]")
    assert "training" in terminal.getvalue()
    assert "\x1b[31m" in terminal.getvalue()
    assert file.getvalue() == "done\n"
