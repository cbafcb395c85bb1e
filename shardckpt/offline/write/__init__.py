"""Write output files: stream, cast, count, report."""
