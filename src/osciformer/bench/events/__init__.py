"""The benchmark of event prediction: data sets, models, cells and their report."""
