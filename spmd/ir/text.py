def format_program(program, annotate=None, mesh=None, locs=False):
    return str(program)
