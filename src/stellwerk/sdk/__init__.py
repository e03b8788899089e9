"""What users of Stellwerk import."""
