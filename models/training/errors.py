"""What a user can mend; free of jax, so that processes that tokenise start fast."""


class DataError(ValueError):
    """Data that cannot be read, does not fit, or is too small; the message is one line."""


class RunError(ValueError):
    """A run that cannot be made; the message is one line."""


class TrainingError(RuntimeError):
    """A run that cannot go on: loss, gradients or an update are not finite."""
