"""The report as one page of html, which needs no network and no other file."""
