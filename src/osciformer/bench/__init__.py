"""Measurements: `python -m osciformer.bench speed` reports error, time and memory."""
