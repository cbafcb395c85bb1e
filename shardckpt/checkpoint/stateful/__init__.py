"""Objects in a state: flatten them, get and load their state."""
