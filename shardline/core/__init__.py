"""Values that all parts share: plan, job, contributions, records, status. Imports neither rpc nor lanes."""
