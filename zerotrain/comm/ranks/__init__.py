"""The ranks' places in a run, and how they meet."""
