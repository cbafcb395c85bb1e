"""Fuzz targets, one for each parser: damage of any kind ends in a typed error or in a result, and in nothing else."""
