"""The shell around the core: reads, asks the core, commits, wakes."""
