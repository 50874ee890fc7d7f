"""Oscillators that a series drives: exact response at any time, in work linear in the rows."""
