"""Steps of a run: find, choose and delete them; schedule of saves."""
