"""Readers of folders that training frameworks write around other formats."""
