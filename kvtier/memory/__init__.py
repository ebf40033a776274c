"""The device side of an engine's process: slots, pages, prefix index, tasks. Needs torch."""
