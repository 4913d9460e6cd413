"""Jobs of several processes: on this machine, or as files and commands for an engine."""
