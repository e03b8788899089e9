"""Doors: dialects that translate requests into kernel calls."""
