"""A module of the user's that cannot be imported."""

raise RuntimeError("broken on purpose")
