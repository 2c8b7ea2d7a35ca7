"""From a command line to jobs."""
