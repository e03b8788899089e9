"""Doing the work: processes, warm Python children, threads, output."""
