"""Only the recipes are asked for."""
