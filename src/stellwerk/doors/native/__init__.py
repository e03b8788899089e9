"""The native door: `/api` in the words of the kernel, for the command line, the page and everyone else."""
