"""The paper's demonstrations and ablations as suites of `osciformer bench`."""
