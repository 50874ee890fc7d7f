"""Oscillator attention: the contract, query paths, drives and one module per backend."""
