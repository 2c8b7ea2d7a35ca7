"""Plans of what is sharded, layouts of elements and cuts into buckets, without collectives."""
