"""The aggregator: sums its workers' pushes, exchanges with the servers for all of them, and holds nothing."""
