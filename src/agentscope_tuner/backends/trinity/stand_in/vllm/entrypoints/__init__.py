"""Names that Trinity imports."""
