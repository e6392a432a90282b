"""pytest on the ranks of a marked test."""
