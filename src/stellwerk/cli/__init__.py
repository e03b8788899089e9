"""The command line: a host is started with `up`, every other command talks to one over `/api`."""
