"""pytest inside a launch: sessions on ranks that the plugin starts, and under somebody's own ``torchrun -m pytest``."""
