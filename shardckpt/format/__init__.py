"""Bytes to manifests: one file a format, `detect` on top. Knows no model and no rank."""
