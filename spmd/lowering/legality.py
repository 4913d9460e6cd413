def check_local(p, stage): pass
