"""Benchmarks: each prints its figures with a yardstick measured in the same run. Read the ratios, not the figures."""
