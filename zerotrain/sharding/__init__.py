"""What is sharded, where each element lies, and how parameters are cut into buckets. No collectives here."""
