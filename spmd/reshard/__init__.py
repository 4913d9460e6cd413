"""From one sharding of a value to another: paths of collectives, their search and their cost."""
