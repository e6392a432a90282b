"""pytest inside a launch: ``torchrun --nproc-per-node 2 -m pytest``."""
