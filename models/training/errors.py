"""What a user can mend about data; free of jax, so that processes that tokenise start fast."""


class DataError(ValueError):
    """Data that cannot be read, does not fit, or is too small; the message is one line."""
