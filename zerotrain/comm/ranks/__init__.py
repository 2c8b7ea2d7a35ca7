"""Who the ranks are and how they meet."""
