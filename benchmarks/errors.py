"""What stops a benchmark before or while it runs."""


class BenchmarkError(Exception):
    """A benchmark cannot be run as asked; the message is one line for the user, or ends with a rank's last output."""
