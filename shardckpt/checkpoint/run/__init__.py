"""The steps of a run: find, choose and delete them; when to save the next one."""
