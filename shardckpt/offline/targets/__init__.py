"""Output formats, and their files."""
