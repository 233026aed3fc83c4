"""Calibrate the params of a preset on a model and a text."""
