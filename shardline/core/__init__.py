"""Value types shared by all parts: plan, job, contributions, records, status. Imports neither rpc nor lanes."""
