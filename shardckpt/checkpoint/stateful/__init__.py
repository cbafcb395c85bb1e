"""Objects in a state: flatten them, take and give back their state."""
