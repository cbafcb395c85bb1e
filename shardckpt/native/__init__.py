"""Native steps: manifest, commit, payload files."""
