"""Stand-in for Transformer Engine, which needs a GPU: accelerate's way into it runs here, the arithmetic is torch's."""
