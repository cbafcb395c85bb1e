"""Folders that training frameworks write around other formats."""
