"""From a job to its ranks."""
