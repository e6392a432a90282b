"""Reports of verdicts: terminal, JSON, Markdown, HTML. Uses only strings and plain data."""
