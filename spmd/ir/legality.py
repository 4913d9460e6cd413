def check_program(program, stage="program"): pass
