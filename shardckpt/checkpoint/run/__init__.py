"""A run's steps: find, choose, save and delete them."""
