"""Names that Trinity imports."""


class ModelConfig:
    """Never made."""
