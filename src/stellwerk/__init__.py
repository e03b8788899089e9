"""Stellwerk: one scheduler, one kernel, five front doors.

This module holds the public names and nothing else, and importing it loads nothing heavy: a warm child
process that runs one function of the user's pays for every import made here.
"""

__all__ = ["__version__"]

__version__ = "0.1.0"
