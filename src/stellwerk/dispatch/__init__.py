"""Wake-ups: hints that now is a good time to look. Losing every one of them costs latency, never work."""
