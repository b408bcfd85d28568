"""Stages of devices whose lanes are elements of vectors."""
