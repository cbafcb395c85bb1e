"""Steps of the native format: manifest, commit, payload files."""
