"""pytest inside a launch: on ranks that the plugin starts, and on those of an external ``torchrun -m pytest``."""
