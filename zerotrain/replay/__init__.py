"""Any step of a run computed again, afterwards, on one rank."""
