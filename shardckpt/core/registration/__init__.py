"""Parameters registered on a module while it is sharded, and while it is not."""
