"""From a command to processes: the launcher of a machine, its workers, restarts, and several machines."""
