"""Which versions of a stream stay: leases of readers, rules, and the removal of the rest."""
