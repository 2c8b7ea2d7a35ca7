"""One job's folder: what it is, whether it goes on, who holds it."""
