"""The default store: one file, one writer, survives power loss."""
