"""What the benchmarks that train estimators share: a queue of jobs and the files they write."""
