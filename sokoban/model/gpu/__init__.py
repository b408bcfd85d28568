"""Stages of devices whose lanes are threads."""
