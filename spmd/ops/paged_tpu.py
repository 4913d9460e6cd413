def attend(*a, **k):
    return NotImplemented
