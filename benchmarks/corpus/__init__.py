"""Programs that nobody wrote for this compiler, and how they are marked."""
