"""The registered data sets, a file for each family."""
