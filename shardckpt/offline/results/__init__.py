"""Results that offline verbs return."""
