"""Text in files, found and read."""
