"""Speed beside the rivals: `make bench`. docs/benchmarks.md says what is measured and what each bar means."""
