"""Truth: rows and journal move together or not at all."""
