"""A sink that keeps records."""


class Notes(list):
    """A sink that keeps records."""

    def write(self, record):
        self.append(record)

    def flush(self):
        pass

    def close(self):
        pass
