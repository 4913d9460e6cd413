"""What goes wrong with a model's configuration."""


class ConfigError(ValueError):
    """A model configuration that cannot be built."""
