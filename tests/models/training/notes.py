"""A sink that keeps records."""


class Notes(list):
    write = list.append

    def flush(self):
        pass

    close = flush
